"""The bundled task set: known bugs in real repositories, stored as recipes and built from source distributions.

`bundled.json` holds no code of those repositories: it names archives by hash, places by byte offsets, tests by id.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from deepswe.atomic import write_atomically
from deepswe.config import BundledTasks
from deepswe.errors import BuildError, ConfigError, TaskError
from deepswe.progress import Progress, Silent
from deepswe.tasks.distributions import Distribution, Pip, build_layers
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.mutation import Mutation, Site
from deepswe.tasks.task import HiddenTests, Repository, Task, TaskSet

DATA = Path(__file__).with_name("bundled.json")
GRADING_TIMEOUT_S = 120.0

OnFailure = Callable[[str, BuildError], None]
"""Name of a repository that cannot be built, and why."""

_log = logging.getLogger(__name__)


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RepositoryRecipe(_Row):
    """One repository of the set."""

    name: str
    version: str
    sha256: str
    license: str
    split: str
    code: tuple[str, ...]
    """Files and directories that bugs are put in."""
    tests: tuple[str, ...]
    """Files and directories that hold its tests."""
    exclude: tuple[str, ...] = ()
    requirements: tuple[str, ...]
    """Exact pins of everything that its tests import."""
    metadata: bool = False
    """Whether its code asks for its own version."""
    pythonpath: tuple[str, ...] = (".",)
    arguments: tuple[str, ...] = ()
    """Extra arguments for pytest."""
    passing: Mapping[str, tuple[str, ...]] = {}
    """Test file -> the rest of the ids of its tests that pass, time after time, on the original code."""

    @property
    def distribution(self) -> Distribution:
        """What its layers are built from."""
        return Distribution(
            name=self.name,
            version=self.version,
            sha256=self.sha256,
            tests=self.tests,
            exclude=self.exclude,
            requirements=self.requirements,
            metadata=self.metadata,
        )


class SiteRecipe(_Row):
    """One edit of a bug: what lies between two byte offsets of a file is replaced."""

    file: str
    start: int
    end: int
    replacement: str
    function: str = ""


class Difficulty(_Row):
    """How hard a bug is, in numbers."""

    sites: int
    """Edits that make it."""
    files: int
    """Files with edits."""
    failing: int
    """F2P tests."""
    distance: int = 0
    """Calls between a failing test and the nearest function with an edit, 1 if it calls that itself; 0 if unknown."""

    @property
    def band(self) -> str:
        """ "easy", "medium" or "hard": one point each for several sites, several files, distance 3 or more, and one
        or two failing tests."""
        points = (self.sites > 1) + (self.files > 1) + (self.distance >= 3) + (self.failing <= 2)
        return ("easy", "medium", "hard")[min(points, 2)]

    @property
    def tags(self) -> dict[str, str]:
        """As tags of a task."""
        return {
            "difficulty": self.band,
            "sites": str(self.sites),
            "files": str(self.files),
            "failing_tests": str(self.failing),
            "distance": str(self.distance),
        }


class TaskRecipe(_Row):
    """One bug of the set."""

    id: str
    repo: str
    kind: str
    seed: int
    sites: tuple[SiteRecipe, ...]
    fail_to_pass: tuple[str, ...]
    test_files: tuple[str, ...]
    """What grading runs: the files that hold a F2P test, and a few more. All else in them that passes is P2P."""
    difficulty: Difficulty
    issue: str

    @property
    def mutation(self) -> Mutation:
        """The bug."""
        return Mutation(
            self.kind, tuple(Site(s.file, s.start, s.end, s.replacement, function=s.function) for s in self.sites)
        )


class Catalogue(_Row):
    """The whole data file."""

    version: int = 2
    build_requirements: tuple[str, ...] = ()
    """Exact pins of the build backends that pip asks for the metadata of the archives."""
    repositories: tuple[RepositoryRecipe, ...]
    tasks: tuple[TaskRecipe, ...] = ()

    def repository(self, name: str) -> RepositoryRecipe:
        """The repository of that name.

        Raises:
            TaskError: there is none.
        """
        for repository in self.repositories:
            if repository.name == name:
                return repository
        raise TaskError(f"there is no bundled repository {name!r}; there are {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the repositories."""
        return tuple(repository.name for repository in self.repositories)


def load_catalogue(path: Path = DATA) -> Catalogue:
    """Read a data file.

    Raises:
        TaskError: it cannot be read or is malformed.
    """
    try:
        return Catalogue.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise TaskError(f"task recipes {path} cannot be read: {error}") from error


def write_catalogue(catalogue: Catalogue, path: Path) -> None:
    """Write a data file, whole or not at all, one recipe a line so that a difference is readable."""
    repositories = [_line(row) for row in catalogue.repositories]
    tasks = [_line(row) for row in catalogue.tasks]
    head = f'{{"version": {catalogue.version},\n"build_requirements": {json.dumps(catalogue.build_requirements)},\n'
    body = '"repositories": [\n' + ",\n".join(repositories) + '\n],\n"tasks": [\n' + ",\n".join(tasks) + "\n]}\n"
    write_atomically(path, head + body)


def _line(row: _Row) -> str:
    return json.dumps(row.model_dump(mode="json", exclude_defaults=True), ensure_ascii=False)


def bundled_task_set(
    config: BundledTasks,
    cache: LayerCache,
    progress: Progress | None = None,
    *,
    on_failure: OnFailure | None = None,
    catalogue: Catalogue | None = None,
    pip: Pip | None = None,
) -> TaskSet:
    """Build what is missing in the cache, and load the tasks. Offline once everything is there.

    Args:
        config: which repositories, and how many tasks; with a limit, tasks are taken from the repositories in turn.
        cache: where the layers are.
        progress: told of each repository.
        on_failure: told of each repository that cannot be built; its tasks are then left out. None lets `progress` say
            so, or without that the log.
        catalogue: the recipes; the bundled ones by default.
        pip: how pip is called.

    Raises:
        ConfigError: `tasks.repositories` names one that is not bundled.
        BuildError: no repository can be built; the message is that of the first.
        TaskError: the data file is malformed.
    """
    catalogue = catalogue or load_catalogue()
    chosen = select_recipes(config, catalogue)
    names = [name for name in catalogue.names if any(row.repo == name for row in chosen)]
    told = on_failure or _teller(progress)
    sources, failures = _build(names, catalogue, cache, pip or Pip(), progress or Silent(), told)
    if failures and not sources:
        raise next(iter(failures.values()))
    rows = [row for row in chosen if row.repo in sources]
    tasks = tuple(make_task(row, sources[row.repo]) for row in rows)
    return TaskSet(tasks, {row.id: make_hidden_tests(row, sources[row.repo]) for row in rows})


def select_recipes(config: BundledTasks, catalogue: Catalogue) -> tuple[TaskRecipe, ...]:
    """The tasks that a recipe asks for, the repositories in turn.

    Raises:
        ConfigError: it names a repository that is not bundled.
    """
    unknown = [name for name in config.repositories if name not in catalogue.names]
    if unknown:
        raise ConfigError(f"tasks.repositories names {unknown[0]!r}; there are {', '.join(catalogue.names)}")
    queues = {name: [row for row in catalogue.tasks if row.repo == name] for name in catalogue.names}
    queues = {name: rows for name, rows in queues.items() if not config.repositories or name in config.repositories}
    turns = max((len(rows) for rows in queues.values()), default=0)
    rows = [rows[turn] for turn in range(turns) for rows in queues.values() if turn < len(rows)]
    return tuple(rows[: config.limit] if config.limit else rows)


@dataclass(frozen=True, slots=True)
class RepositorySource:
    """A repository with its layers built.

    Attributes:
        recipe: what it is.
        base: directory of its tree without tests.
        tests: path -> text of its test files.
    """

    recipe: RepositoryRecipe
    base: Path
    tests: Mapping[str, str]

    def text(self, file: str) -> str:
        """A file of the original code.

        Raises:
            TaskError: there is none, or it is no UTF-8.
        """
        try:
            return (self.base / file).read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"{self.recipe.name}: {file} cannot be read: {error}") from error


def build_source(
    recipe: RepositoryRecipe, cache: LayerCache, pip: Pip, build_requirements: Sequence[str]
) -> RepositorySource:
    """Build the layers of a repository where they are missing.

    Raises:
        BuildError: naming the repository.
    """
    distribution = recipe.distribution
    build_layers(distribution, cache, pip, build_requirements)
    tests = cache.path(distribution.tests_key)
    texts = {}
    for file in sorted(tests.rglob("*")):
        if file.is_file():
            try:
                texts[file.relative_to(tests).as_posix()] = file.read_bytes().decode()
            except UnicodeDecodeError:
                continue
    return RepositorySource(recipe, cache.path(distribution.base_key), texts)


def make_task(row: TaskRecipe, source: RepositorySource, origin: str = "bundled") -> Task:
    """The public part: the mutated files, and the tests except the files that hold a F2P test."""
    recipe = source.recipe
    hidden = {test.split("::")[0] for test in row.fail_to_pass}
    visible = {path: text for path, text in source.tests.items() if path not in hidden}
    mutation = row.mutation
    return Task(
        id=row.id,
        repo=recipe.name,
        problem_statement=row.issue,
        repository=Repository(
            base=recipe.distribution.base_key,
            environment=recipe.distribution.environment_key,
            files={**visible, **{file: mutation.apply(file, source.text(file)) for file in mutation.files}},
            removed=file_lists(source.base),
            pythonpath=recipe.pythonpath,
        ),
        source=origin,
        split=recipe.split,
        kind=row.kind,
        tags=row.difficulty.tags,
        license=recipe.license,
    )


def file_lists(base: Path) -> tuple[str, ...]:
    """Lists of files in a source distribution's metadata: they name the hidden test files, and nothing reads them."""
    found = (*base.glob("*.egg-info/SOURCES.txt"), *base.glob("*/*.egg-info/SOURCES.txt"))
    return tuple(sorted(path.relative_to(base).as_posix() for path in found))


def make_hidden_tests(row: TaskRecipe, source: RepositorySource) -> HiddenTests:
    """The hidden part: the test files that grading runs and whatever they lean on, as they are in the archive."""
    recipe = source.recipe
    left_out = {path for path in source.tests if is_test_module(path)} - set(row.test_files)
    fail_to_pass = set(row.fail_to_pass)
    known = [f"{file}::{rest}" for file in row.test_files for rest in recipe.passing[file]]
    return HiddenTests(
        task_id=row.id,
        files={path: text for path, text in source.tests.items() if path not in left_out},
        fail_to_pass=tuple(test for test in known if test in fail_to_pass),
        pass_to_pass=tuple(test for test in known if test not in fail_to_pass),
        arguments=recipe.arguments,
        timeout_s=GRADING_TIMEOUT_S,
        gold_patch=gold_patch(row, source),
    )


def is_test_module(path: str) -> bool:
    """Whether pytest would collect a file by its name."""
    name = path.rpartition("/")[2]
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def gold_patch(row: TaskRecipe, source: RepositorySource) -> str:
    """The unified diff from the bug back to the original."""
    parts = []
    for file in row.mutation.files:
        original = source.text(file)
        before = row.mutation.apply(file, original).splitlines(keepends=True)
        lines = difflib.unified_diff(before, original.splitlines(keepends=True), f"a/{file}", f"b/{file}")
        parts.append(f"diff --git a/{file} b/{file}\n" + "".join(lines))
    return "".join(parts)


def _build(
    names: Sequence[str],
    catalogue: Catalogue,
    cache: LayerCache,
    pip: Pip,
    progress: Progress,
    on_failure: OnFailure,
) -> tuple[dict[str, RepositorySource], dict[str, BuildError]]:
    sources: dict[str, RepositorySource] = {}
    failures: dict[str, BuildError] = {}
    progress.begin("Repositories", len(names))
    for name in names:
        try:
            sources[name] = build_source(catalogue.repository(name), cache, pip, catalogue.build_requirements)
        except BuildError as error:
            failures[name] = error
            on_failure(name, error)
        progress.advance(note=name)
    return sources, failures


def _teller(progress: Progress | None) -> OnFailure:
    def tell(name: str, error: BuildError) -> None:
        line = f"bundled repository {name} is left out: {error}"
        if progress is None:
            _log.warning(line)
        else:
            progress.say(line)

    return tell
