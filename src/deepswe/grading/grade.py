"""Grade a patch: a fresh sandbox, the pristine tree, the patch, the hidden tests, a structured report, a verdict."""

from __future__ import annotations

import functools
import re
import secrets
from pathlib import Path

from deepswe.errors import DeepsweError, GradingError, boundary
from deepswe.grading.report import Report, read_report
from deepswe.grading.tree import ENVIRONMENT, ROOT, Workshop, lay_tree
from deepswe.sandbox.base import ExecResult, Sandbox
from deepswe.tasks.task import HiddenTests, Runner, Task
from deepswe.types import Grade, Graded, Ungraded

APPLY_TIMEOUT_S = 60.0
PATCH = "/tmp/patch.diff"
CONFIGURATION = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
"""Names of files that steer a test run; a patch may touch them only where the gold patch does."""
TEST_DIRECTORIES = ("test", "tests")
"""Directories whose files a patch may touch only where the gold patch does."""
_TOUCHED = re.compile(r"^(?:--- a/|\+\+\+ b/|rename from |rename to )(.+?)\t?$", re.MULTILINE)
_GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C"}


async def grade(patch: str, task: Task, hidden: HiddenTests, workshop: Workshop) -> Grade:
    """What a patch is worth.

    The patch is applied to the pristine tree in a sandbox of its own. Test files, files that steer test runs and
    whatever lies in a test directory stay as the task has them (but for what the gold patch touches); the hidden tests
    are laid over. Reward 1 needs a complete report in which each F2P and P2P test passed.

    Returns:
        `Graded` where the tests could be run, or could not because of the patch; `Ungraded` where the sandbox or the
        runner failed.
    """
    try:
        with boundary("grading", GradingError):
            if not hidden.fail_to_pass + hidden.pass_to_pass:
                raise GradingError(f"task {task.id} has no tests to grade by; give it fail_to_pass or pass_to_pass")
            async with workshop.open(task, "grade") as sandbox:
                return await _grade(sandbox, patch, task, hidden)
    except DeepsweError as error:
        return Ungraded(str(error), error.place or "grading")


async def _grade(sandbox: Sandbox, patch: str, task: Task, hidden: HiddenTests) -> Grade:
    with boundary("grading.tree", GradingError):
        await lay_tree(sandbox, task.repository, {PATCH: patch.encode()} if patch else None)
    refused = await _apply(sandbox, patch, hidden) if patch else ""
    if refused:
        return Graded(0.0, _statuses(Report(), hidden), f"the patch does not apply: {refused}")
    try:
        await sandbox.write_files({f"{ROOT}/{path}": text.encode() for path, text in hidden.files.items()})
    except OSError as error:
        if not patch:
            raise
        return Graded(0.0, _statuses(Report(), hidden), f"the patch leaves no place for the hidden tests: {error}")
    nonce = secrets.token_hex(16)
    with boundary("grading.run", GradingError):
        result = await sandbox.exec(
            runner_command(hidden.runner, task.repository.environment is not None),
            timeout_s=hidden.timeout_s,
            env={"PYTHONHASHSEED": "0", "PYTHONPATH": ""},
            stdin=runner_request(nonce, task, hidden),
            channel=True,
        )
    return decide(result, read_report(result.channel, nonce), hidden)


async def _apply(sandbox: Sandbox, patch: str, hidden: HiddenTests) -> str:
    """Apply the patch; why it cannot be, or ""."""
    if not touched_paths(patch):
        return "it names no file"
    kept = [f"--exclude={_literal(path)}" for path in sorted(protected_paths(patch, hidden))]
    command = ["git", "apply", "--whitespace=nowarn", "--allow-empty", *kept, PATCH]
    with boundary("grading.apply", GradingError):
        result = await sandbox.exec(command, timeout_s=APPLY_TIMEOUT_S, env=_GIT)
        if result.timed_out or result.exit_code in (126, 127, 137):
            raise GradingError(f"git apply did not run (exit code {result.exit_code}); install git where sandboxes run")
    return (result.stderr.decode("utf-8", "replace").strip() or "it is malformed") if result.exit_code else ""


def touched_paths(patch: str) -> set[str]:
    """The paths that a unified diff names."""
    return set(_TOUCHED.findall(patch)) | set(re.findall(r"^diff --git a/(.+) b/\1$", patch, re.MULTILINE))


def protected_paths(patch: str, hidden: HiddenTests) -> set[str]:
    """The paths of a patch that stay as the task has them."""
    tests = {test.split("::")[0] for test in hidden.fail_to_pass + hidden.pass_to_pass} | set(hidden.files)
    gold = touched_paths(hidden.gold_patch)
    return {
        path for path in touched_paths(patch) if path in tests or (path not in gold and _steers_tests(path.split("/")))
    }


def _steers_tests(parts: list[str]) -> bool:
    return parts[-1] in CONFIGURATION or any(part in TEST_DIRECTORIES for part in parts[:-1])


def _literal(path: str) -> str:
    """A path as a pattern of git that matches it alone."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", path)


@functools.cache
def _runner_source(runner: str) -> str:
    return (Path(__file__).parent / "runner" / f"{runner}_runner.py").read_text(encoding="utf-8")


def runner_command(runner: Runner, environment: bool) -> list[str]:
    """How the runner is started; without an environment Python needs no `site`, which saves half of its start."""
    python = [f"{ENVIRONMENT}/bin/python"] if environment else ["python3", "-S"]
    return [*python, "-s", "-B", "-c", _runner_source(runner)]


def runner_request(nonce: str, task: Task, hidden: HiddenTests) -> bytes:
    """The runner's standard input."""
    tests = list(dict.fromkeys(hidden.fail_to_pass + hidden.pass_to_pass))
    return repr((nonce, ROOT, task.repository.pythonpath, hidden.arguments, tests)).encode()


def decide(result: ExecResult, report: Report, hidden: HiddenTests) -> Grade:
    """The verdict on a finished test run."""
    if report.broken or not report.started:
        words = report.broken or result.stderr.decode("utf-8", "replace").strip()[-500:]
        return Ungraded(f"the test runner did not start (exit code {result.exit_code}): {words}", "grading.runner")
    statuses = _statuses(report, hidden)
    if result.timed_out:
        return Graded(0.0, statuses, f"the tests took more than {hidden.timeout_s:.0f} s")
    if report.problem:
        return Graded(0.0, statuses, f"{report.problem} (exit code {result.exit_code})")
    bad = [test for test, status in statuses.items() if status != "passed"]
    if not bad:
        return Graded(1.0, statuses)
    first = f"{bad[0]} {statuses[bad[0]]}"
    if report.details.get(bad[0]):
        first += f" ({report.details[bad[0]].splitlines()[0]})"
    return Graded(0.0, statuses, f"{len(bad)} of {len(statuses)} tests did not pass: {first}")


def _statuses(report: Report, hidden: HiddenTests) -> dict[str, str]:
    return {test: report.statuses.get(test, "missing") for test in hidden.fail_to_pass + hidden.pass_to_pass}
