"""The tests that candidates of a task are run against: generated ones, and the repository's own.

An agent's generated tests are the test modules that its patch adds. What is kept of them is decided on the base, where
no candidate has a say: a test must run there, with the same end each time, and not for want of an import; at least one
must fail; of two tests with one body the second goes. The repository's own tests are kept where they pass each time.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deepswe.envs.solvers import read_patch
from deepswe.errors import TaskError
from deepswe.grading.grade import grade
from deepswe.grading.report import Report
from deepswe.grading.tree import Workshop
from deepswe.sandbox.base import ExecResult
from deepswe.tasks.bundled import is_test_module
from deepswe.tasks.task import HiddenTests, Runner, Task
from deepswe.types import Grade, Graded, Ungraded

RUNS = 3
"""Runs on the base by which a flaky test is told."""
TIMEOUT_S = 120.0
TRIES = 3
"""Runs of the same thing while the infrastructure fails."""
_IMPORTS = re.compile(
    r"\b(ModuleNotFoundError|ImportError|NameError|SyntaxError|IndentationError)\b|cannot be imported"
)
_DECIDING = ("passed", "failed", "error")


@dataclass(frozen=True, slots=True)
class Written:
    """Test modules.

    Attributes:
        files: path -> text.
        tests: full ids, in the order of the text.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    tests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checks:
    """What the candidates of one task are run against.

    Attributes:
        task_id: whose.
        runner: how.
        files: path -> text of every test module.
        regression: ids of the repository's own tests that pass on the base.
        generated: id -> status on the base, of the generated tests that were kept.
        dropped: id -> why a test was not kept.
    """

    task_id: str
    runner: Runner
    files: Mapping[str, str]
    regression: tuple[str, ...] = ()
    generated: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def tests(self) -> tuple[str, ...]:
        """All ids."""
        return (*self.regression, *self.generated)

    @property
    def key(self) -> str:
        """Changes with anything that can change a result."""
        said = json.dumps([self.runner, sorted(self.files.items()), self.tests])
        return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def as_tests(self) -> HiddenTests:
        """The form in which grading runs them; nothing of the task's hidden tests is in it."""
        files = {path: self.files[path] for path in dict.fromkeys(test.split("::")[0] for test in self.tests)}
        failing = tuple(test for test, status in self.generated.items() if status != "passed")
        passing = tuple(test for test in self.tests if test not in failing)
        return HiddenTests(self.task_id, files, failing, passing, runner=self.runner, timeout_s=TIMEOUT_S)


def runner_of(task: Task) -> Runner:
    """pytest where the task brings an environment that may hold it, else unittest."""
    return "unittest" if task.repository.environment is None and task.image is None else "pytest"


def read_written(patch: str, runner: Runner) -> Written:
    """The test modules that a patch adds.

    Raises:
        ValueError: it does something else than to add test modules, or holds no test.
    """
    files, tests = {}, []
    for change in read_patch(patch):
        if not (change.created and change.plain and is_test_module(change.path)):
            raise ValueError(f"{change.path} is no new test module; add files named test_*.py and change no other")
        files[change.path] = "".join(hunk.new for hunk in change.hunks)
        tests += find_tests(change.path, files[change.path], runner)
    if not tests:
        raise ValueError("there is no test in it; add files named test_*.py with tests")
    return Written(files, tuple(tests))


def find_tests(path: str, text: str, runner: Runner) -> list[str]:
    """Full ids of the tests of a module as its text names them; none if it cannot be parsed."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            names = [n.name for n in node.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
            found += [f"{path}::{node.name}::{name}" for name in names]
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test") and runner == "pytest":
            found.append(f"{path}::{node.name}")
    return list(dict.fromkeys(found))


def join_written(parts: Iterable[Written]) -> Written:
    """The tests of several attempts; a path that two of them use gets a number."""
    files: dict[str, str] = {}
    tests: list[str] = []
    for part in parts:
        names = {}
        for path, text in part.files.items():
            name, number = path, 2
            while name in files and files[name] != text:
                name, number = f"{path.removesuffix('.py')}_{number}.py", number + 1
            names[path] = name
            files[name] = text
        for test in part.tests:
            path, _, rest = test.partition("::")
            tests.append(f"{names[path]}::{rest}")
    return Written(files, tuple(dict.fromkeys(tests)))


def repeated(written: Written) -> dict[str, str]:
    """Test -> the earlier test with the same body, names apart."""
    first: dict[str, str] = {}
    found = {}
    bodies = {path: _bodies(path, text) for path, text in written.files.items()}
    for test in written.tests:
        body = bodies[test.split("::")[0]].get(test, test)
        if first.setdefault(body, test) != test:
            found[test] = first[body]
    return found


def _bodies(path: str, text: str) -> dict[str, str]:
    found = {}
    for node in ast.parse(text).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in inner:
            if isinstance(function, ast.FunctionDef):
                name = function.name if node is function else f"{getattr(node, 'name', '')}::{function.name}"
                parts = [function.args, *function.decorator_list, *function.body]
                found[f"{path}::{name}"] = "\n".join(map(ast.dump, parts))
    return found


@dataclass(frozen=True, slots=True)
class Observation:
    """What a run of tests showed.

    Attributes:
        statuses: test -> status; "missing" where the run cannot be believed.
        details: test -> one line about why it did not pass.
        problem: why nothing counts, or "".
    """

    statuses: Mapping[str, str]
    details: Mapping[str, str]
    problem: str = ""


async def observe(patch: str, task: Task, tests: HiddenTests, workshop: Workshop) -> Observation | Ungraded:
    """Run tests on a patch in a fresh sandbox through the grading's own machinery, tried anew where that fails.

    Exact statuses of a run that can be believed as a whole; otherwise no test counts as passed (see `believe`).
    """
    failure = Ungraded("never tried", "scaling.checks")
    for _ in range(TRIES):
        reports: list[Report] = []

        def verdict(result: ExecResult, report: Report, asked: HiddenTests, sentinels: frozenset[str]) -> Grade:
            reports.append(report)  # noqa: B023  (called before the next turn)
            return believe(result, report, asked, sentinels)

        found = await grade(patch, task, tests, workshop, verdict=verdict)
        if isinstance(found, Graded):
            return Observation(found.statuses, reports[-1].details if reports else {}, found.reason)
        failure = found
    return failure


def believe(result: ExecResult, report: Report, tests: HiddenTests, sentinels: frozenset[str]) -> Grade:
    """The statuses of a run, if nothing in it is odd; else every test is missing.

    Stricter than a verdict, which only asks whether all passed: here each single pass counts, so a run is believed
    only if it ended in time and in order, each sentinel failed, and nothing was reported that nobody asked for.
    """
    if report.broken or not report.started or (report.guarded and not report.ended and not result.timed_out):
        words = report.broken or report.problem or result.stderr.decode("utf-8", "replace").strip()[-500:]
        return Ungraded(f"the test runner did not work (exit code {result.exit_code}): {words}", "grading.runner")
    odd = ""
    if result.timed_out:
        odd = f"the tests took more than {tests.timeout_s:.0f} s"
    elif report.problem:
        odd = report.problem
    elif any(report.statuses.get(test, "missing") not in ("failed", "error") for test in sentinels):
        odd = "a test that must fail did not"
    elif unasked := sorted(set(report.statuses) - set(tests.tests) - sentinels):
        odd = f"a test was reported that nobody asked for ({unasked[0]})"
    statuses = {test: "missing" if odd else report.statuses.get(test, "missing") for test in tests.tests}
    passed = sum(status == "passed" for status in statuses.values())
    return Graded(passed / len(statuses), statuses, odd)


async def settle_checks(
    task: Task, written: Written, own: Written, workshop: Workshop, *, runs: int = RUNS
) -> Checks | Ungraded:
    """Decide on the base which tests are kept.

    Args:
        task: whose.
        written: generated tests.
        own: tests of the repository.
        workshop: where sandboxes come from.
        runs: on the base, every other one in the reverse order.

    Returns:
        The checks, without generated tests where none of them fails; or why there is no verdict.
    """
    runner, same = runner_of(task), repeated(written)
    generated = [test for test in written.tests if test not in same]
    checks = Checks(task.id, runner, {**own.files, **written.files}, own.tests, dict.fromkeys(generated, "failed"))
    if not checks.tests:
        return replace(checks, files={})
    seen: list[Observation] = []
    for number in range(runs):
        tests = checks.as_tests()
        if number % 2:
            backwards = (tests.fail_to_pass[::-1], tests.pass_to_pass[::-1])
            tests = replace(tests, fail_to_pass=backwards[0], pass_to_pass=backwards[1])
        found = await observe("", task, tests, workshop)
        if isinstance(found, Ungraded):
            return found
        seen.append(found)
    return _keep(checks, seen, {test: f"the same as {other}" for test, other in same.items()})


def _keep(checks: Checks, seen: Sequence[Observation], dropped: dict[str, str]) -> Checks:
    kept: dict[str, str] = {}
    for test in checks.generated:
        if reason := _why_not(test, seen):
            dropped[test] = reason
        else:
            kept[test] = seen[0].statuses[test]
    if kept and all(status == "passed" for status in kept.values()):
        dropped |= dict.fromkeys(kept, "no generated test fails before the change")
        kept = {}
    regression = tuple(t for t in checks.regression if all(run.statuses.get(t) == "passed" for run in seen))
    used = {test.split("::")[0] for test in (*regression, *kept)}
    files = {path: text for path, text in checks.files.items() if path in used}
    return replace(checks, files=files, regression=regression, generated=kept, dropped=dropped)


def _why_not(test: str, seen: Sequence[Observation]) -> str:
    """Why a generated test is not kept, or ""."""
    statuses = {run.statuses.get(test, "missing") for run in seen}
    if problem := next((run.problem for run in seen if run.problem), ""):
        return f"a run of its suite cannot be believed: {problem}"
    if len(statuses) > 1:
        return f"flaky: {' and '.join(sorted(statuses))}"
    status = next(iter(statuses))
    if status not in _DECIDING:
        return f"it is {status}"
    detail = next((run.details[test] for run in seen if test in run.details), "")
    return f"it lacks an import: {detail}" if status != "passed" and _IMPORTS.search(detail) else ""


def load_checks(row: Mapping[str, object]) -> Checks:
    """One record of a file of checks.

    Raises:
        TaskError: it is none.
    """
    try:
        checks = Checks(**row)  # type: ignore[arg-type]
        made = replace(checks, regression=tuple(checks.regression))
        if not {test.split("::")[0] for test in made.tests} <= set(made.files):
            raise ValueError("a test without its file")
        return made
    except (TypeError, ValueError, AttributeError) as error:
        raise TaskError(f"no generated tests of a task ({error}); give a file of `deepswe tests generate`") from error
