"""Find tasks: put bugs into a repository, keep those that its tests notice in a fair way, describe them."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepswe.errors import TaskError
from deepswe.progress import Progress
from deepswe.tasks.bundled import RepositorySource, TaskRecipe, is_test_module
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache, layer_key
from deepswe.tasks.synth.bench import Bench, TestRun
from deepswe.tasks.synth.issue import (
    Case,
    Outcome,
    Sight,
    documentation_of,
    extract_case,
    read_replay,
    replay_script,
    write_issue,
)
from deepswe.tasks.synth.mutate import Mutation, is_sound, mutations

TOOLS = ("coverage==7.17.5",)
_SCRIPT_TIMEOUT_S = 20.0
_CASES_TRIED = 6
_PROFILE = "profile.json"

OnTask = Callable[[TaskRecipe], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How many tasks of which sort.

    Attributes:
        target: tasks to find in the repository.
        seed: of the order in which bugs are tried, and of the issue texts.
        per_function, per_kind: at most this many tasks each.
        min_failing, max_failing: F2P tests of a task.
        max_failing_share: of the tests that pass on the original.
        files_seconds: test files are added to those with F2P tests while the whole takes at most this long.
        repeats: runs of the original before a test counts as stable.
        budget_s: wall time after which the search ends with what it has.
    """

    target: int = 10
    seed: int = 0
    per_function: int = 1
    per_kind: int = 2
    min_failing: int = 2
    max_failing: int = 40
    max_failing_share: float = 0.2
    files_seconds: float = 2.0
    repeats: int = 3
    budget_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What the original does.

    Attributes:
        passing: tests that pass every time, in order.
        covering: code file -> line -> tests that run it.
        seconds: test file -> seconds of its tests.
        whole_s: one run of everything.
    """

    passing: tuple[str, ...]
    covering: Mapping[str, Mapping[int, frozenset[str]]]
    seconds: Mapping[str, float]
    whole_s: float

    def tests_at(self, mutation: Mutation) -> frozenset[str]:
        """Passing tests that run a line of the mutated node."""
        lines = self.covering.get(mutation.file, {})
        found: set[str] = set()
        for line in range(mutation.line, mutation.last_line + 1):
            found |= lines.get(line, frozenset())
        return frozenset(found)

    def by_file(self) -> dict[str, tuple[str, ...]]:
        """Test file -> the rest of the ids of its passing tests."""
        grouped: dict[str, list[str]] = defaultdict(list)
        for test in self.passing:
            file, _, rest = test.partition("::")
            grouped[file].append(rest)
        return {file: tuple(rests) for file, rests in grouped.items()}


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        tasks: recipes that held, the known ones first.
        passing: test file -> the rest of the ids of its stable tests.
        verdicts: how many bugs met which end ("task", "unnoticed", "one failing", ...).
    """

    tasks: tuple[TaskRecipe, ...]
    passing: Mapping[str, tuple[str, ...]]
    verdicts: Mapping[str, int]


def find_tasks(
    source: RepositorySource,
    cache: LayerCache,
    plan: Plan,
    progress: Progress,
    *,
    known: Sequence[TaskRecipe] = (),
    on_task: OnTask | None = None,
    pip: Pip | None = None,
) -> Found:
    """Search one repository. What the original does is measured once and kept in the cache.

    Args:
        source: the repository.
        cache: holds its layers, the measuring tools and the profile.
        plan: how many tasks of which sort.
        progress: told of each task.
        known: tasks that were found earlier; they count, and new ones are numbered after them.
        on_task: called with each new task at once, so that an interrupted search loses nothing.
        pip: how pip is called.

    Raises:
        BuildError: the measuring tools cannot be installed.
        TaskError: the original's tests cannot be run, or pass too seldom to be of use.
    """
    tools = cache.build(
        layer_key("synth-tools", {"requirements": TOOLS}),
        lambda place: (pip or Pip()).run(
            "installation of coverage", ["install", "--quiet", "--no-deps", "--target", str(place), *TOOLS]
        ),
    )
    environment = cache.path(source.recipe.distribution.environment_key)
    with Bench(source, environment) as bench:
        place = cache.build(
            _profile_key(source, plan), lambda place: write_profile(measure(bench, tools, plan), place / _PROFILE)
        )
        return search(bench, read_profile(place / _PROFILE), plan, progress, known, on_task)


def search(
    bench: Bench,
    profile: Profile,
    plan: Plan,
    progress: Progress,
    known: Sequence[TaskRecipe] = (),
    on_task: OnTask | None = None,
) -> Found:
    """Try bugs until the plan is met, its time is over or none is left. Arguments as for `find_tasks`."""
    progress.begin(f"Bugs in {bench.source.recipe.name}", plan.target)
    return _Search(bench, profile, plan, progress, known, on_task or (lambda task: None)).run()


def _profile_key(source: RepositorySource, plan: Plan) -> str:
    distribution = source.recipe.distribution
    return layer_key(
        f"profile-{source.recipe.name}",
        {
            "layers": [distribution.base_key, distribution.tests_key, distribution.environment_key],
            "run": [source.recipe.pythonpath, source.recipe.arguments, source.recipe.code, TOOLS, plan.repeats],
        },
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Keep a profile."""
    number = {test: at for at, test in enumerate(profile.passing)}
    covering = {
        file: {line: sorted(number[test] for test in tests) for line, tests in lines.items()}
        for file, lines in profile.covering.items()
    }
    record = {"passing": profile.passing, "covering": covering, "seconds": profile.seconds, "whole_s": profile.whole_s}
    path.write_text(json.dumps(record), encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """What `write_profile` wrote."""
    record = json.loads(path.read_text(encoding="utf-8"))
    passing = tuple(record["passing"])
    covering = {
        file: {int(line): frozenset(passing[at] for at in tests) for line, tests in lines.items()}
        for file, lines in record["covering"].items()
    }
    return Profile(passing, covering, record["seconds"], record["whole_s"])


def measure(bench: Bench, tools: Path, plan: Plan) -> Profile:
    """Run the original's tests several times, once with coverage.

    Raises:
        TaskError: a run did not end, or fewer than ten tests pass every time.
    """
    recipe = bench.source.recipe
    files = [path for path in bench.source.tests if is_test_module(path)]
    started = time.monotonic()
    runs = [bench.run_tests(files, timeout_s=600.0) for _ in range(plan.repeats)]
    whole_s = (time.monotonic() - started) / plan.repeats
    measured = sorted({str(Path(place).parent) if place.endswith(".py") else place for place in recipe.code})
    coverage = ["-m", "coverage", "run", "--data-file=../home/coverage", f"--source={','.join(measured)}"]
    runs.append(bench.run_tests(files, timeout_s=900.0, launcher=[*coverage, "-m", "pytest"], path=[tools]))
    if not all(run.complete for run in runs):
        raise TaskError(f"{recipe.name}: a run of the original tests did not come to its end")
    stable = frozenset.intersection(*(run.passed for run in runs))
    passing = tuple(test for test in runs[0].statuses if test in stable)
    if len(passing) < 10:
        raise TaskError(f"{recipe.name}: only {len(passing)} tests pass every time; at least 10 are needed")
    seconds: dict[str, float] = defaultdict(float)
    for test, taken in runs[0].seconds.items():
        seconds[test.split("::")[0]] += taken
    return Profile(passing, _read_coverage(bench, tools, stable), dict(seconds), whole_s)


def _read_coverage(bench: Bench, tools: Path, stable: frozenset[str]) -> dict[str, dict[int, frozenset[str]]]:
    launcher = [
        "-m",
        "coverage",
        "json",
        "--data-file=../home/coverage",
        "--show-contexts",
        "-o",
        "../home/coverage.json",
    ]
    if not bench.run_tool(launcher, timeout_s=300.0, path=[tools]):
        raise TaskError(f"{bench.source.recipe.name}: the coverage of its tests could not be read")
    record = json.loads((bench.root.parent / "home" / "coverage.json").read_text())
    code = set(_code_files(bench.source))
    return {
        file: {int(line): frozenset(tests) & stable for line, tests in content.get("contexts", {}).items()}
        for file, content in record["files"].items()
        if file in code
    }


class _Search:
    """One search; its state is what was found so far."""

    def __init__(
        self,
        bench: Bench,
        profile: Profile,
        plan: Plan,
        progress: Progress,
        known: Sequence[TaskRecipe],
        on_task: OnTask,
    ) -> None:
        self.bench = bench
        self.recipe = bench.source.recipe
        self.profile = profile
        self.plan = plan
        self.progress = progress
        self.on_task = on_task
        self.tasks = list(known)
        self.rng = random.Random(f"{plan.seed}:{self.recipe.name}")
        self.verdicts: Counter[str] = Counter()
        self.functions = Counter((task.file, task.function) for task in known)
        self.kinds = Counter(task.kind for task in known)
        self.steady: dict[tuple[str, ...], bool] = {}
        self.code = {path: bench.source.text(path) for path in _code_files(bench.source)}
        self.support = {Path(path).stem for path in bench.source.tests} | {"tests", "test"}

    def run(self) -> Found:
        deadline = time.monotonic() + self.plan.budget_s
        for mutation in self._candidates():
            if len(self.tasks) >= self.plan.target or time.monotonic() > deadline:
                break
            if self.functions[mutation.file, mutation.function] >= self.plan.per_function:
                continue
            if self.kinds[mutation.kind] >= self.plan.per_kind:
                continue
            verdict = self._try(mutation)
            self.bench.write(mutation.file, self.code[mutation.file])
            self._keep(verdict)
        used = {file for task in self.tasks for file in task.test_files}
        passing = {file: rests for file, rests in self.profile.by_file().items() if file in used}
        return Found(tuple(self.tasks), passing, dict(self.verdicts))

    def _keep(self, verdict: TaskRecipe | str) -> None:
        if isinstance(verdict, str):
            self.verdicts[verdict] += 1
            return
        self.verdicts["task"] += 1
        self.functions[verdict.file, verdict.function] += 1
        self.kinds[verdict.kind] += 1
        self.tasks.append(verdict)
        self.on_task(verdict)
        self.progress.advance(note=f"{verdict.kind} in {verdict.function}")

    def _candidates(self) -> Iterator[Mutation]:
        """Mutations of lines that two tests run, the kinds in turn, each kind in random order."""
        by_kind: dict[str, list[Mutation]] = defaultdict(list)
        for path, text in self.code.items():
            for mutation in mutations(path, text):
                if len(self.profile.tests_at(mutation)) >= self.plan.min_failing:
                    by_kind[mutation.kind].append(mutation)
        kinds = sorted(by_kind)
        for kind in kinds:
            self.rng.shuffle(by_kind[kind])
        while any(by_kind.values()):
            self.rng.shuffle(kinds)
            for kind in kinds:
                if by_kind[kind]:
                    yield by_kind[kind].pop()

    def _try(self, mutation: Mutation) -> TaskRecipe | str:
        """The task that a bug makes, or why it makes none."""
        original = self.code[mutation.file]
        if not is_sound(mutation, original):
            return "unsound"
        covering = self.profile.tests_at(mutation)
        self.bench.write(mutation.file, mutation.apply(original))
        run = self._run(sorted({test.split("::")[0] for test in covering}), sorted(covering))
        if not run.complete:
            return "no end" if run.timed_out else "crash"
        failing = covering - run.passed
        limit = min(self.plan.max_failing, int(len(self.profile.passing) * self.plan.max_failing_share))
        if not failing:
            return "unnoticed"
        if not self.plan.min_failing <= len(failing) <= limit:
            return "one failing" if len(failing) < self.plan.min_failing else "too many failing"
        sight = self._sight(mutation, run, failing)
        if sight is None:
            return "no case to show"
        files = self._choose_files(mutation, failing)
        again = self._run(files)
        if not again.complete or _broken_files(again):
            return "no end"
        expected = {test for test in self.profile.passing if test.split("::")[0] in files}
        broken = expected - again.passed
        if broken & covering != failing or len(broken) > limit:
            return "flaky"
        self.bench.write(mutation.file, original)
        if not self._is_steady(files, expected):
            return "flaky original"
        issue = write_issue(sight, random.Random(f"{self.plan.seed}:{mutation}"))
        return self._recipe_row(mutation, broken, files, issue)

    def _recipe_row(self, mutation: Mutation, failing: set[str], files: Sequence[str], issue: str) -> TaskRecipe:
        return TaskRecipe(
            id=f"{self.recipe.name}-{len(self.tasks) + 1:03d}",
            repo=self.recipe.name,
            file=mutation.file,
            kind=mutation.kind,
            start=mutation.start,
            end=mutation.end,
            replacement=mutation.replacement,
            function=mutation.function,
            seed=self.plan.seed,
            fail_to_pass=tuple(test for test in self.profile.passing if test in failing),
            test_files=tuple(files),
            issue=issue,
        )

    def _run(self, files: Sequence[str], tests: Sequence[str] = ()) -> TestRun:
        return self.bench.run_tests(files, tests, timeout_s=10.0 + 4.0 * self.profile.whole_s)

    def _is_steady(self, files: tuple[str, ...], expected: set[str]) -> bool:
        """Whether these files alone pass on the original."""
        if files not in self.steady:
            run = self._run(files)
            self.steady[files] = run.complete and expected <= run.passed
        return self.steady[files]

    def _choose_files(self, mutation: Mutation, failing: frozenset[str]) -> tuple[str, ...]:
        """Files with failing tests, and up to two more that run most of the mutated file, while they are quick."""
        chosen = sorted({test.split("::")[0] for test in failing})
        running: Counter[str] = Counter()
        for tests in self.profile.covering.get(mutation.file, {}).values():
            running.update({test.split("::")[0] for test in tests})
        spent = sum(self.profile.seconds.get(file, 0.0) for file in chosen)
        for file, _ in sorted(running.items(), key=lambda item: (-item[1], item[0])):
            taken = self.profile.seconds.get(file, 0.0)
            if file not in chosen and spent + taken <= self.plan.files_seconds and len(chosen) < 4:
                chosen.append(file)
                spent += taken
        return tuple(sorted(chosen))

    def _sight(self, mutation: Mutation, run: TestRun, failing: frozenset[str]) -> Sight | None:
        """A failing case that stands alone, replayed on both codes."""
        tests = sorted(failing)
        self.rng.shuffle(tests)
        tried = 0
        for test in tests:
            failure = run.failures.get(test)
            if failure is None or tried >= _CASES_TRIED:
                continue
            module = self.bench.source.tests[test.split("::")[0]]
            case = extract_case(module, test, failure.line, failure.parameters, sorted(self.support))
            if case is None:
                continue
            tried += 1
            sight = self._replay(mutation, case)
            if sight is not None:
                return sight
        return None

    def _replay(self, mutation: Mutation, case: Case) -> Sight | None:
        script = replay_script(case)
        original = self.code[mutation.file]
        actual = self._outcome(script)
        self.bench.write(mutation.file, original)
        expected = self._outcome(script)
        self.bench.write(mutation.file, mutation.apply(original))
        if actual is None or expected is None or (actual.value, actual.error) == (expected.value, expected.error):
            return None
        return Sight(case, expected, actual, documentation_of(case, self.code), self.recipe.version, self.recipe.name)

    def _outcome(self, script: str) -> Outcome | None:
        """What a case gives, if the seed of hashes has no part in it: a reader has another one."""
        outputs = [self.bench.run_script(script, timeout_s=_SCRIPT_TIMEOUT_S, hash_seed=seed) for seed in (0, 1)]
        outcomes = [read_replay(output) for output in outputs]
        return outcomes[0] if outcomes[0] == outcomes[1] else None


def _code_files(source: RepositorySource) -> list[str]:
    files: list[str] = []
    for place in source.recipe.code:
        root = source.base / place
        found = [root] if root.is_file() else sorted(root.rglob("*.py"))
        files += [path.relative_to(source.base).as_posix() for path in found]
    return files


def _broken_files(run: TestRun) -> list[str]:
    return [test for test, status in run.statuses.items() if "::" not in test and status == "error"]
