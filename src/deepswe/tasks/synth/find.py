"""Find tasks: put bugs into a repository, keep those that its tests notice in a fair way, describe them."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from deepswe.errors import TaskError
from deepswe.progress import Progress
from deepswe.tasks.bundled import Difficulty, RepositorySource, SiteRecipe, TaskRecipe, gold_patch
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.issue import (
    Outcome,
    Sight,
    documentation_of,
    extract_case,
    read_replay,
    replay_script,
    write_issue,
)
from deepswe.tasks.synth.leaks import leaks
from deepswe.tasks.synth.mutation import Mutation, is_sound
from deepswe.tasks.synth.operators.catalog import mutations
from deepswe.tasks.synth.profile import Profile, code_files, install_tools, profile_of
from deepswe.tasks.synth.symptom import read_symptom, write_symptom
from deepswe.tasks.synth.warm import HASH_SEEDS, TestRun, WarmBench, Watch

_SCRIPT_TIMEOUT_S = 10.0
_CASES_TRIED = 3
_ISSUES_TRIED = 4

TASK = "task"
"""The verdict on a bug that became a task."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many tasks of which sort.

    Attributes:
        target: tasks to find in the repository.
        seed: of the order in which bugs are tried, and of the issue texts.
        kinds: only these kinds; empty takes all.
        per_function, per_kind: at most this many tasks each; 0 sets no limit.
        min_failing, max_failing: F2P tests of a task.
        max_covering: bugs in code that more tests than this run are not tried: they would break too much.
        files_seconds: test files are added to those with F2P tests while the whole takes at most this long.
        confirm: run whole test files, as grading does, and each alone on the original, before a task is kept.
        max_tried: bugs to try at most; 0 sets no limit.
        budget_s: wall time after which the search ends with what it has.
    """

    target: int = 10
    seed: int = 0
    kinds: tuple[str, ...] = ()
    per_function: int = 3
    per_kind: int = 0
    min_failing: int = 1
    max_failing: int = 20
    max_covering: int = 60
    files_seconds: float = 2.0
    confirm: bool = False
    max_tried: int = 0
    budget_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one bug.

    Attributes:
        key: names the bug, the same in every run of the search.
        reason: "task", or why it is none: "unsound", "unnoticed", "trivial", "too many failing", "too few failing",
            "nothing left passing", "flaky", "no end", "crash", "leaks", "says too little" (its issue).
        task: the recipe of a task.
    """

    key: str
    reason: str
    task: TaskRecipe | None = None


class Limits(TypedDict):
    """Of one run of tests."""

    timeout_s: float
    cpu_s: float


class IssueWriter(Protocol):
    """Rewrites an issue, for instance with a language model; what it returns is checked for leaks again."""

    def rewrite(self, draft: str, documentation: str, seed: int) -> str:
        """The new text.

        Raises:
            TaskError: it cannot be written; the draft is then kept.
        """
        ...


OnVerdict = Callable[[Verdict], None]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        tasks: recipes that held, the known ones first.
        passing: test file -> the rest of the ids of its stable tests, for the files that tasks use.
        verdicts: how many bugs met which end.
        covered: bugs that could be tried: tests run their place, and not more tests than the plan allows.
    """

    tasks: tuple[TaskRecipe, ...]
    passing: Mapping[str, tuple[str, ...]]
    verdicts: Mapping[str, int]
    covered: int = 0


def find_tasks(
    source: RepositorySource,
    cache: LayerCache,
    plan: Plan,
    progress: Progress,
    *,
    environment: Path | None = None,
    known: Sequence[TaskRecipe] = (),
    journal: Sequence[Verdict] = (),
    on_verdict: OnVerdict | None = None,
    writer: IssueWriter | None = None,
    pip: Pip | None = None,
) -> Found:
    """Search one repository. What the original does is measured once and kept in the cache.

    Args:
        source: the repository.
        cache: holds its layers, the measuring tools and the profile.
        plan: how many tasks of which sort.
        progress: told of each task.
        environment: the directory of its environment; by default the layer of its distribution.
        known: tasks that were found earlier; they count, and new ones are numbered after them.
        journal: verdicts of an interrupted search of the same plan; they are not tried again.
        on_verdict: called with each new verdict at once, so that an interrupted search loses nothing.
        writer: rewrites the issues.
        pip: how pip is called.

    Raises:
        BuildError: the measuring tools cannot be installed.
        ProjectRefused: the original's tests cannot be run, or pass too seldom to be of use.
    """
    tools = install_tools(cache, pip or Pip())
    place = environment or cache.path(source.recipe.distribution.environment_key)
    with WarmBench(source, place, tools=tools) as bench:
        progress.begin(f"Tests of {source.recipe.name}", 1)
        profile = profile_of(source, bench, cache)
        progress.advance()
        return search(bench, profile, plan, progress, known, journal, on_verdict, writer)


def search(
    bench: WarmBench,
    profile: Profile,
    plan: Plan,
    progress: Progress,
    known: Sequence[TaskRecipe] = (),
    journal: Sequence[Verdict] = (),
    on_verdict: OnVerdict | None = None,
    writer: IssueWriter | None = None,
) -> Found:
    """Try bugs until the plan is met, its time is over or none is left. Arguments as for `find_tasks`."""
    progress.begin(f"Bugs in {bench.source.recipe.name}", plan.target)
    finder = Finder(bench, profile, plan, known, writer)
    past = {verdict.key: verdict for verdict in journal}
    deadline = time.monotonic() + plan.budget_s
    for mutation in finder.candidates():
        if finder.is_done or time.monotonic() > deadline:
            break
        if not finder.is_wanted(mutation):
            continue
        verdict = past.get(key_of(mutation))
        if verdict is None:
            verdict = finder.attempt(mutation)
            if on_verdict is not None:
                on_verdict(verdict)
        finder.keep(verdict)
        if verdict.task is not None:
            progress.advance(note=f"{verdict.task.kind} in {verdict.task.sites[0].function}")
    return finder.found()


def key_of(mutation: Mutation) -> str:
    """A name for a bug that is the same in every run."""
    return "; ".join([mutation.kind, *(f"{s.file}:{s.start}:{s.end}:{s.replacement}" for s in mutation.sites)])


class Finder:
    """Tries bugs in one repository; its state is what was found so far."""

    def __init__(
        self,
        bench: WarmBench,
        profile: Profile,
        plan: Plan,
        known: Sequence[TaskRecipe] = (),
        writer: IssueWriter | None = None,
    ) -> None:
        self.bench = bench
        self.recipe = bench.source.recipe
        self.profile = profile
        self.plan = plan
        self.writer = writer
        self.tasks = list(known)
        self.verdicts: Counter[str] = Counter()
        self.functions: Counter[tuple[str, str]] = Counter()
        self.kinds: Counter[str] = Counter()
        for task in known:
            self._count(task)
        self.known = {key_of(task.mutation) for task in known}
        self.covered = 0
        self.steady: dict[str, bool] = {}
        self.code = {path: bench.source.text(path) for path in code_files(bench.source)}
        self.support = sorted({Path(path).stem for path in bench.source.tests} | {"tests", "test"})

    @property
    def is_done(self) -> bool:
        """Whether the plan is met."""
        tried = sum(self.verdicts.values())
        return len(self.tasks) >= self.plan.target or bool(self.plan.max_tried and tried >= self.plan.max_tried)

    def is_wanted(self, mutation: Mutation) -> bool:
        """Whether there are not enough tasks of its kind and of its functions yet."""
        plan = self.plan
        if key_of(mutation) in self.known:
            return False
        if plan.per_kind and self.kinds[mutation.kind] >= plan.per_kind:
            return False
        return not plan.per_function or all(self.functions[item] < plan.per_function for item in mutation.functions)

    def keep(self, verdict: Verdict) -> None:
        """Count a verdict, and keep its task."""
        self.verdicts[verdict.reason] += 1
        if verdict.task is not None:
            self.tasks.append(verdict.task)
            self._count(verdict.task)

    def _count(self, task: TaskRecipe) -> None:
        self.kinds[task.kind] += 1
        for item in task.mutation.functions:
            self.functions[item] += 1

    def found(self) -> Found:
        """What there is so far."""
        used = {file for task in self.tasks for file in task.test_files}
        passing = {file: rests for file, rests in self.profile.by_file().items() if file in used}
        return Found(tuple(self.tasks), passing, dict(self.verdicts), self.covered)

    def candidates(self) -> Iterator[Mutation]:
        """Bugs in code that some tests run and not too many, the kinds in turn, each kind in random order."""
        rng = random.Random(f"{self.plan.seed}:{self.recipe.name}")
        by_kind: dict[str, list[Mutation]] = defaultdict(list)
        for path, text in self.code.items():
            if self.profile.covering.get(path):
                for mutation in mutations(path, text):
                    if self._is_open(mutation):
                        by_kind[mutation.kind].append(mutation)
        kinds = sorted(by_kind)
        for kind in kinds:
            rng.shuffle(by_kind[kind])
        self.covered = sum(len(group) for group in by_kind.values())
        while any(by_kind.values()):
            rng.shuffle(kinds)
            for kind in kinds:
                if by_kind[kind]:
                    yield by_kind[kind].pop()

    def _is_open(self, mutation: Mutation) -> bool:
        if self.plan.kinds and mutation.kind not in self.plan.kinds:
            return False
        return self.plan.min_failing <= len(self.profile.tests_of(mutation)) <= self.plan.max_covering

    def attempt(self, mutation: Mutation) -> Verdict:
        """Try one bug; the tree is the original's again afterwards."""
        key = key_of(mutation)
        if not is_sound(mutation, self.code):
            return Verdict(key, "unsound")
        for file in mutation.files:
            self.bench.write(file, mutation.apply(file, self.code[file]))
        try:
            result = self._judge(mutation)
        finally:
            for file in mutation.files:
                self.bench.write(file, self.code[file])
        if isinstance(result, str):
            return Verdict(key, result)
        return Verdict(key, TASK, result)

    def _judge(self, mutation: Mutation) -> TaskRecipe | str:
        """The task that a bug makes, or why it makes none."""
        plan, covering = self.plan, self.profile.tests_of(mutation)
        first = self._run(covering, maxfail=1)
        reason = _trouble(first)
        if reason:
            return reason
        if covering <= first.passed:
            return "unnoticed"
        witness = next((test for test, status in first.statuses.items() if status in ("failed", "error")), "")
        functions = tuple((file, name.rpartition(".")[2]) for file, name in mutation.functions)
        watch = Watch(witness, functions)
        full = self._run_files(covering, watch) if plan.confirm else self._run_covering(covering, watch)
        reason = _trouble(full)
        if reason:
            return reason
        judged = self._tests_in(covering) if plan.confirm else covering
        failing = frozenset(test for test in judged if full.statuses.get(test) in ("failed", "error"))
        if len(failing) > plan.max_failing:
            return "too many failing"
        if witness not in failing or failing & first.passed or failing - covering or judged - failing - full.passed:
            return "flaky"
        if len(failing) < plan.min_failing:
            return "too few failing"
        files = self._choose_files(mutation, failing, covering)
        if not any(test.split("::")[0] in files and test not in failing for test in self.profile.passing):
            return "nothing left passing"
        if plan.confirm and not all(self._is_steady(file) for file in files):
            return "flaky"
        return self._describe(mutation, full, failing, files)

    def _run(
        self, tests: frozenset[str], *, maxfail: int = 0, hash_seed: int = 0, watch: Watch | None = None
    ) -> TestRun:
        return self.bench.run_tests(
            sorted({test.split("::")[0] for test in tests}),
            sorted(tests),
            maxfail=maxfail,
            hash_seed=hash_seed,
            watch=watch,
            **self._limits(tests),
        )

    def _run_covering(self, covering: frozenset[str], watch: Watch) -> TestRun:
        """The tests that run the place, with another hash seed, until clearly too many failed."""
        return self._run(covering, maxfail=self.plan.max_failing + 1, hash_seed=HASH_SEEDS[1], watch=watch)

    def _run_files(self, covering: frozenset[str], watch: Watch) -> TestRun:
        """All of their files, as grading does."""
        tests = self._tests_in(covering)
        files = sorted({test.split("::")[0] for test in tests})
        return self.bench.run_tests(files, hash_seed=HASH_SEEDS[1], watch=watch, **self._limits(tests))

    def _limits(self, tests: frozenset[str]) -> Limits:
        seconds = 1.0 + 4.0 * self.profile.seconds_of(tests)
        return {"timeout_s": 20.0 + 10.0 * seconds, "cpu_s": seconds + 1.0}

    def _tests_in(self, tests: frozenset[str]) -> frozenset[str]:
        """All passing tests of the files that hold these."""
        files = {test.split("::")[0] for test in tests}
        return frozenset(test for test in self.profile.passing if test.split("::")[0] in files)

    def _is_steady(self, file: str) -> bool:
        """Whether a test file passes on the original when it is run alone."""
        if file not in self.steady:
            expected = frozenset(test for test in self.profile.passing if test.split("::")[0] == file)
            run = self.bench.run_tests([file], pristine=True, **self._limits(expected))
            self.steady[file] = run.complete and expected <= run.passed
        return self.steady[file]

    def _choose_files(self, mutation: Mutation, failing: frozenset[str], covering: frozenset[str]) -> tuple[str, ...]:
        """Files with failing tests, and up to two more that run most of the mutated files, while they are quick."""
        chosen = sorted({test.split("::")[0] for test in failing})
        running: Counter[str] = Counter()
        for file in mutation.files:
            for tests in self.profile.covering.get(file, {}).values():
                running.update({test.split("::")[0] for test in tests})
        seen = {test.split("::")[0] for test in covering}
        seconds: dict[str, float] = defaultdict(float)
        for test, taken in self.profile.test_seconds.items():
            seconds[test.split("::")[0]] += taken
        spent = sum(seconds[file] for file in chosen)
        for file, _ in sorted(running.items(), key=lambda item: (-item[1], item[0])):
            known = file in seen or not self.plan.confirm
            if known and file not in chosen and spent + seconds[file] <= self.plan.files_seconds and len(chosen) < 4:
                chosen.append(file)
                spent += seconds[file]
        return tuple(sorted(chosen))

    def _describe(
        self, mutation: Mutation, run: TestRun, failing: frozenset[str], files: tuple[str, ...]
    ) -> TaskRecipe | str:
        task = TaskRecipe(
            id=f"{self.recipe.name}-{len(self.tasks) + 1:03d}",
            repo=self.recipe.name,
            kind=mutation.kind,
            seed=self.plan.seed,
            sites=tuple(
                SiteRecipe(file=s.file, start=s.start, end=s.end, replacement=s.replacement, function=s.function)
                for s in mutation.sites
            ),
            fail_to_pass=tuple(test for test in self.profile.passing if test in failing),
            test_files=files,
            difficulty=Difficulty(
                sites=len(mutation.sites), files=len(mutation.files), failing=len(failing), distance=run.distance
            ),
            issue="",
        )
        patch = gold_patch(task, self.bench.source)
        refusal = "says too little"
        for draft, documentation in self._drafts(mutation, run, failing):
            if leaks(draft, task.fail_to_pass, files, patch):
                refusal = "leaks"
                continue
            text = self._rewritten(draft, documentation)
            if leaks(text, task.fail_to_pass, files, patch):
                text = draft
            return task.model_copy(update={"issue": text})
        return refusal

    def _rewritten(self, draft: str, documentation: str) -> str:
        if self.writer is None:
            return draft
        try:
            return self.writer.rewrite(draft, documentation, self.plan.seed)
        except TaskError:
            return draft

    def _drafts(self, mutation: Mutation, run: TestRun, failing: frozenset[str]) -> Iterator[tuple[str, str]]:
        """Issue texts, the better ones first, each with the documentation that it leans on."""
        rng = random.Random(f"{self.plan.seed}:{key_of(mutation)}")
        tests = sorted(test for test in failing if test in run.failures)
        rng.shuffle(tests)
        if len(failing) > 1:
            sight = self._sight(tests, run)
            if sight is not None:
                for _ in range(_ISSUES_TRIED):
                    yield write_issue(sight, rng), sight.documentation
        for test in tests[:_ISSUES_TRIED]:
            failure = run.failures[test]
            symptom = read_symptom(
                self.bench.source.tests[test.split("::")[0]],
                failure.line,
                failure.error,
                failure.message,
                self.code,
                project=self.recipe.name,
                version=self.recipe.version,
                reveal=len(failing) > 1,
            )
            if symptom.says_enough:
                yield write_symptom(symptom, rng), symptom.documentation

    def _sight(self, tests: Sequence[str], run: TestRun) -> Sight | None:
        """A failing case that stands alone, replayed on both codes."""
        tried = 0
        for test in tests:
            failure = run.failures[test]
            if tried >= _CASES_TRIED or not failure.line:
                continue
            module = self.bench.source.tests[test.split("::")[0]]
            case = extract_case(module, test, failure.line, failure.parameters, self.support)
            if case is None:
                continue
            tried += 1
            script = replay_script(case)
            actual, expected = self._outcome(script, False), self._outcome(script, True)
            if actual and expected and (actual.value, actual.error) != (expected.value, expected.error):
                documentation = documentation_of(case, self.code)
                return Sight(case, expected, actual, documentation, self.recipe.version, self.recipe.name)
        return None

    def _outcome(self, script: str, pristine: bool) -> Outcome | None:
        """What a case gives, if the seed of hashes has no part in it: a reader has another one."""
        outcomes = [
            read_replay(self.bench.run_script(script, timeout_s=_SCRIPT_TIMEOUT_S, hash_seed=seed, pristine=pristine))
            for seed in HASH_SEEDS
        ]
        return outcomes[0] if outcomes[0] == outcomes[1] else None


def _trouble(run: TestRun) -> str:
    """Why a run with a bug tells nothing; "" if it tells something."""
    if not run.complete:
        return "no end" if run.timed_out else "crash"
    return "trivial" if run.broken_files else ""
