"""The lock of a task set: everything that another machine needs to build the same layers, and what they must be.

An environment is locked by its exact packages with the hashes of their archives, a tree by the archive, the git tree or
the project that it comes from. Every layer has the hash of its content, which a rebuilt one must have, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deepswe.atomic import write_atomically
from deepswe.errors import BuildError, TaskError
from deepswe.progress import Progress
from deepswe.tasks.bundled import Catalogue, load_catalogue
from deepswe.tasks.distributions import Distribution, Pip, fetch_sdist, unpack
from deepswe.tasks.environments import (
    Environment,
    Package,
    build_environment,
    hash_layer,
    resolve,
    this_machine,
    this_python,
)
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.commits_history import History, open_source
from deepswe.tasks.synth.commits_tasks import build_tree
from deepswe.tasks.synth.project import fetch, is_url
from deepswe.tasks.task import TaskSet
from deepswe.tasks.taskset import task_set_hash


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LockedEnvironment(_Row):
    """One environment layer."""

    key: str
    hash: str
    python: str
    machine: str
    packages: tuple[Package, ...]
    project: str = ""
    version: str = ""


class LockedArchive(_Row):
    """One half of a project: its tree without tests, or its tests alone."""

    key: str
    hash: str
    name: str
    version: str
    sha256: str
    half: Literal["base", "tests"]
    tests: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    spec: str = ""
    """The directory, the archive or the git URL that it was made from; "" for a source distribution of the index."""


class LockedTree(_Row):
    """A tree of a git repository."""

    key: str
    hash: str
    name: str
    tree: str
    url: str = ""


class Lock(_Row):
    """The whole file."""

    version: Literal[1] = 1
    task_set: str = ""
    """Hash of the set."""
    build_requirements: tuple[str, ...] = ()
    """Exact pins of the build backends that pip asks for the metadata of archives."""
    environments: tuple[LockedEnvironment, ...] = ()
    archives: tuple[LockedArchive, ...] = ()
    trees: tuple[LockedTree, ...] = ()


def make_lock(
    tasks: TaskSet, cache: LayerCache, progress: Progress, *, pip: Pip | None = None, catalogue: Catalogue | None = None
) -> Lock:
    """Lock the layers of a set, all of which lie in the cache.

    Args:
        tasks: the set.
        cache: with its layers.
        progress: told of each layer.
        pip: is asked for the hashes of packages that are pinned by version alone.
        catalogue: of the bundled repositories, by default the package's own.

    Raises:
        BuildError: a layer is not there, or nothing says what it was built from.
    """
    catalogue = catalogue or load_catalogue()
    keys = dict.fromkeys(
        key for task in tasks.tasks for key in (task.repository.environment, task.repository.base) if key is not None
    )
    distributions = _distributions(catalogue)
    environments, archives, trees = [], [], []
    progress.begin("Lock", len(keys))
    for key in keys:
        digest = hash_layer(cache.path(key))
        match cache.origin(key), distributions.get(key):
            case {"environment": dict(found)}, _:
                environments.append(_locked(key, digest, _environment(found)))
            case {"git": dict(found)}, _:
                trees.append(LockedTree(key=key, hash=digest, **found))
            case {"archive": dict(found)}, _:
                archives.append(LockedArchive(key=key, hash=digest, **found))
            case {"pinned": dict(found)}, _:
                environments.append(_locked(key, digest, _pinned(cache, pip or Pip(), **found)))
            case _, ("environment", distribution):
                environments.append(_locked(key, digest, _pinned(cache, pip or Pip(), **distribution.pinned)))
            case _, ("base" | "tests" as half, distribution):
                archives.append(LockedArchive(key=key, hash=digest, **distribution.archive(half)))
            case _:
                raise BuildError(
                    f"nothing says what layer {key} was built from; build its tasks again with this version"
                )
        progress.advance(note=key)
    return Lock(
        task_set=task_set_hash(tasks),
        build_requirements=catalogue.build_requirements if archives else (),
        environments=tuple(environments),
        archives=tuple(archives),
        trees=tuple(trees),
    )


_Half = Literal["environment", "base", "tests"]


def _distributions(catalogue: Catalogue) -> dict[str, tuple[_Half, Distribution]]:
    found: dict[str, tuple[_Half, Distribution]] = {}
    for repository in catalogue.repositories:
        distribution = repository.distribution
        found[distribution.environment_key] = ("environment", distribution)
        found[distribution.base_key] = ("base", distribution)
        found[distribution.tests_key] = ("tests", distribution)
    return found


def _environment(record: Mapping[str, Any]) -> Environment:
    packages = tuple(Package(row["name"], row["version"], tuple(row["sha256"])) for row in record["packages"])
    return Environment(packages, record["project"], record["version"])


def _pinned(cache: LayerCache, pip: Pip, *, requirements: Sequence[str], project: str, version: str) -> Environment:
    """An environment that was built from pins, with the hashes of what they name."""
    packages = resolve(requirements, cache, pip, needs=False) if requirements else ()
    return Environment(packages, project, version)


def _locked(key: str, digest: str, environment: Environment) -> LockedEnvironment:
    return LockedEnvironment(key=key, hash=digest, python=this_python(), machine=this_machine(), **_plain(environment))


def _plain(environment: Environment) -> dict[str, Any]:
    return asdict(environment)


def write_lock(lock: Lock, path: Path) -> None:
    """Write a lock, whole or not at all.

    Raises:
        TaskError: it cannot be written.
    """
    try:
        write_atomically(path, lock.model_dump_json(indent=1, exclude_defaults=True) + "\n")
    except OSError as error:
        raise TaskError(f"lock {path} cannot be written: {error.strerror}; give another path") from error


def read_lock(path: Path) -> Lock:
    """Read a lock.

    Raises:
        TaskError: it cannot be read or is none.
    """
    try:
        return Lock.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TaskError(f"lock {path} cannot be read: {error.strerror}; make one with deepswe tasks lock") from error
    except ValidationError as error:
        raise TaskError(f"{path} is no lock of this version: {error}") from error


def restore(
    lock: Lock,
    cache: LayerCache,
    progress: Progress,
    *,
    pip: Pip | None = None,
    repositories: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Build the layers that are missing, and check that every one is what the lock says.

    Args:
        lock: what to build.
        cache: where.
        progress: told of each layer.
        pip: how pip is called.
        repositories: name -> path or URL of a git repository or a project, instead of what the lock says.

    Returns:
        Keys of the layers that were built.

    Raises:
        BuildError: another Python or platform, a repository that is not to be had, or a layer that is another one than
            the lock's; a layer that was built wrongly is removed.
    """
    built: list[str] = []
    pip = pip or Pip()
    progress.begin("Layers", len(lock.environments) + len(lock.archives) + len(lock.trees))
    with ExitStack() as stack:
        histories = _Histories(stack, cache, repositories or {})
        layers: list[tuple[str, str, Callable[[], object]]] = []
        for row in lock.environments:
            _check_platform(row, cache)
            layers.append((row.key, row.hash, _environment_builder(row, cache, pip)))
        for archive in lock.archives:
            layers.append((archive.key, archive.hash, _archive_builder(archive, lock, cache, pip, repositories or {})))
        for tree in lock.trees:
            layers.append((tree.key, tree.hash, _tree_builder(tree, histories, cache)))
        for key, digest, build in layers:
            there = key in cache
            build()
            _check(key, digest, cache, built=not there)
            if not there:
                built.append(key)
            progress.advance(note=key)
    return tuple(built)


def _check_platform(row: LockedEnvironment, cache: LayerCache) -> None:
    minor = row.python.rpartition(".")[0]
    if row.key not in cache and (this_python().rpartition(".")[0], this_machine()) != (minor, row.machine):
        raise BuildError(
            f"environment {row.key} is locked for Python {row.python} on {row.machine}, this is Python {this_python()} "
            f"on {this_machine()}; use that Python, or make the tasks and their lock again here"
        )


def _check(key: str, wanted: str, cache: LayerCache, *, built: bool) -> None:
    found = hash_layer(cache.path(key))
    if found == wanted:
        return
    if built:
        cache.remove(key)
    raise BuildError(
        f"layer {key} has the content {found[:16]}, the lock says {wanted[:16]}; "
        + ("what it is built from has changed" if built else f"remove it from {cache.root} and build it again")
    )


def _environment_builder(row: LockedEnvironment, cache: LayerCache, pip: Pip) -> Callable[[], object]:
    environment = Environment(row.packages, row.project, row.version)
    return lambda: build_environment(environment, cache, pip, key=row.key)


def _archive_builder(
    row: LockedArchive, lock: Lock, cache: LayerCache, pip: Pip, places: Mapping[str, str]
) -> Callable[[], object]:
    distribution = Distribution(row.name, row.version, row.sha256, row.tests, row.exclude)

    def wanted(path: PurePosixPath) -> bool:
        excluded = any(path.is_relative_to(place) for place in row.exclude)
        tests = any(path.is_relative_to(place) for place in row.tests)
        return not excluded and tests == (row.half == "tests")

    def build(place: Path) -> None:
        if not row.spec:
            unpack(fetch_sdist(distribution, cache, pip, lock.build_requirements), place, wanted)
            return
        with tempfile.TemporaryDirectory(prefix="deepswe-project-") as work:
            unpack(fetch(_project_of(row, places), Path(work), pip).archive, place, wanted)

    return lambda: cache.build(row.key, build)


def _project_of(row: LockedArchive, places: Mapping[str, str]) -> str:
    """Where the project of a layer is; never a name, which the package index would be asked for."""
    place = places.get(row.name, row.spec)
    if not is_url(place) and not Path(place).expanduser().exists():
        raise BuildError(
            f"layer {row.key} was made from {row.name} in {place}, which is not here; say where that project is with "
            f"--repository {row.name}=PATH, and have it as it was then"
        )
    return place


class _Histories:
    """Repositories, each opened once."""

    def __init__(self, stack: ExitStack, cache: LayerCache, places: Mapping[str, str]) -> None:
        self._stack, self._cache, self._places = stack, cache, places
        self._open: dict[str, History] = {}

    def of(self, row: LockedTree) -> History:
        """The history that holds a tree."""
        place = self._places.get(row.name, row.url)
        if not place:
            raise BuildError(
                f"layer {row.key} is a tree of the git repository {row.name}, of which the lock knows no URL; "
                f"say where it is with --repository {row.name}=PATH"
            )
        if place not in self._open:
            self._open[place] = self._stack.enter_context(History(open_source(place, self._cache)))
        return self._open[place]


def _tree_builder(row: LockedTree, histories: _Histories, cache: LayerCache) -> Callable[[], object]:
    def build() -> None:
        if row.key not in cache:
            build_tree(histories.of(row), row.tree, row.name, cache, url=row.url)

    return build
