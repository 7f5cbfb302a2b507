"""Grade a patch: a fresh sandbox, the pristine tree, the patch, the hidden tests, a structured report, a verdict."""

from __future__ import annotations

import errno
import random
import secrets
from collections.abc import Callable
from dataclasses import replace

from deepswe.errors import DeepsweError, GradingError, boundary
from deepswe.grading.patch import apply_options, can_fill_disk, is_machine_failure, refusal
from deepswe.grading.report import Report, read_report
from deepswe.grading.run import RUN_ENVIRONMENT, runner_command, runner_input
from deepswe.grading.scripted import grade_by_script
from deepswe.grading.sealed import Sealed, open_seals, seal
from deepswe.grading.sentinels import mix_sentinels
from deepswe.grading.tree import ROOT, Workshop, lay_tree, prepare_image, remove_paths, tree_files
from deepswe.sandbox.base import ExecResult, Sandbox
from deepswe.tasks.task import HiddenTests, Task
from deepswe.types import Grade, Graded, Ungraded

Verdict = Callable[[ExecResult, Report, HiddenTests, frozenset[str]], Grade]
"""Judges a finished test run: its result, its report, the wanted tests, and the ids of the sentinels among them."""

APPLY_TIMEOUT_S = 60.0
PATCH = "/tmp/patch.diff"
_GIT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C"}
_REFUSED_CODES = (1, 128)
"""What git exits with when a patch does not fit, or is none."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EEXIST)
"""What a patch can do to the place of a hidden file."""


async def grade(
    patch: str, task: Task, hidden: HiddenTests, workshop: Workshop, *, verdict: Verdict | None = None
) -> Grade:
    """What a patch is worth.

    The patch is applied to the pristine tree in a sandbox of its own. Test files, files that steer test runs and
    whatever lies in a test directory stay as the task has them (but for what the gold patch touches); the hidden tests
    are laid over, with tests among them that must fail (`deepswe.grading.sentinels`), and without expected values that
    can be kept out (`deepswe.grading.sealed`). Reward 1 needs a complete report
    in which each F2P and P2P test passed and none of those did.

    Args:
        patch: the work.
        task: whose tree it is applied to.
        hidden: the tests that judge it.
        workshop: where sandboxes come from.
        verdict: judges the finished test run in place of `decide`.

    Returns:
        `Graded` where the tests could be run, or could not because of the patch; `Ungraded` where the sandbox or the
        runner failed.
    """
    try:
        with boundary("grading", GradingError):
            if not hidden.tests:
                raise GradingError(f"task {task.id} has no tests to grade by; give it fail_to_pass or pass_to_pass")
            reason = refusal(patch, hidden) if patch else ""
            if reason:
                return Graded(0.0, _statuses(Report(), hidden), f"the patch does not apply: {reason}")
            async with workshop.open(task, "grade") as sandbox:
                return await _grade(sandbox, patch, task, hidden, verdict or decide)
    except DeepsweError as error:
        return Ungraded(str(error), error.place or "grading")


async def _grade(sandbox: Sandbox, patch: str, task: Task, hidden: HiddenTests, verdict: Verdict) -> Grade:
    with boundary("grading.tree", GradingError):
        if task.image is not None:
            await prepare_image(sandbox, task.image, for_agent=False)
        await (remove_paths if patch else lay_tree)(sandbox, task.repository)
    refused = await _apply(sandbox, patch, task, hidden) if patch else ""
    if refused:
        return Graded(0.0, _statuses(Report(), hidden), f"the patch does not apply: {refused}")
    if hidden.runner == "script":
        return await grade_by_script(sandbox, task, hidden)
    plain = hidden.runner == "unittest" and task.repository.environment is None and task.image is None
    sealed = seal(hidden) if plain else Sealed(hidden.files)
    mixed = mix_sentinels(replace(hidden, files=sealed.files), random.SystemRandom())
    nonce = secrets.token_hex(16)
    with boundary("grading.run", GradingError):
        try:
            result = await sandbox.exec(
                runner_command(task),
                timeout_s=hidden.timeout_s,
                env=RUN_ENVIRONMENT,
                stdin=runner_input(nonce, hidden.runner, task, hidden.arguments, mixed.tests),
                channel=True,
                files={f"{ROOT}/{path}": text.encode() for path, text in mixed.files.items()},
            )
        except OSError as error:
            if not (error.errno in _IN_THE_WAY or (error.errno in _FULL and can_fill_disk(patch))):
                raise
            reason = f"the patch leaves no place for the hidden tests: {error}"
            return Graded(0.0, _statuses(Report(), hidden), reason)
    report = open_seals(read_report(result.channel, nonce), sealed.expected)
    return verdict(result, report, hidden, mixed.sentinels)


async def _apply(sandbox: Sandbox, patch: str, task: Task, hidden: HiddenTests) -> str:
    """Lay the tree and apply what may be applied of the patch; why it cannot be, or "".

    Raises:
        GradingError: the tree cannot be laid, or git itself could not work.
    """
    files = {**tree_files(task.repository), PATCH: patch.encode("utf-8", "surrogateescape")}
    command = ["git", "apply", "--whitespace=nowarn", "--allow-empty", *apply_options(hidden), PATCH]
    with boundary("grading.apply", GradingError):
        result = await sandbox.exec(command, timeout_s=APPLY_TIMEOUT_S, env=_GIT, files=files)
        words = result.stderr.decode("utf-8", "replace").strip()
        if result.timed_out or (result.exit_code and result.exit_code not in _REFUSED_CODES):
            raise GradingError(f"git apply did not run (exit code {result.exit_code}); install git where sandboxes run")
        full = "No space left" in words or "quota exceeded" in words
        if (full and not can_fill_disk(patch)) or is_machine_failure(words):
            raise GradingError(f"git apply could not work: {words}")
    return (words or "it is malformed") if result.exit_code else ""


def decide(result: ExecResult, report: Report, hidden: HiddenTests, sentinels: frozenset[str] = frozenset()) -> Grade:
    """The verdict on a finished test run.

    A run that did not begin, or whose reporter died where the code under test could not have ended it, is no verdict.

    Args:
        result: of the runner.
        report: what it reported.
        hidden: the wanted tests, and the status that each must have.
        sentinels: ids of tests that ran among them and must not pass.
    """
    if report.broken or not report.started:
        words = report.broken or result.stderr.decode("utf-8", "replace").strip()[-500:]
        return Ungraded(f"the test runner did not start (exit code {result.exit_code}): {words}", "grading.runner")
    statuses = _statuses(report, hidden)
    if result.timed_out:
        return Graded(0.0, statuses, f"the tests took more than {hidden.timeout_s:.0f} s")
    if report.guarded and not report.ended:
        words = f"the report of the tests is cut off (exit code {result.exit_code}): {report.problem}"
        return Ungraded(words, "grading.reporter")
    if report.problem:
        return Graded(0.0, statuses, f"{report.problem} (exit code {result.exit_code})")
    if any(report.statuses.get(test) == "passed" for test in sentinels):
        return Graded(0.0, statuses, "forged: a test that must fail was reported as passed")
    bad = [test for test, status in statuses.items() if status != hidden.expected.get(test, "passed")]
    if bad:
        first = f"{bad[0]} {statuses[bad[0]]}"
        if report.details.get(bad[0]):
            first += f" ({report.details[bad[0]].splitlines()[0]})"
        return Graded(0.0, statuses, f"{len(bad)} of {len(statuses)} tests did not pass: {first}")
    if any(report.statuses.get(test, "missing") not in ("failed", "error") for test in sentinels):
        return Graded(0.0, statuses, "forged: a test that must fail was kept from running")
    unasked = sorted(set(report.statuses) - set(hidden.tests) - sentinels)
    if unasked:
        return Graded(0.0, statuses, f"forged: a test was reported that nobody asked for ({unasked[0]})")
    return Graded(1.0, statuses)


def _statuses(report: Report, hidden: HiddenTests) -> dict[str, str]:
    return {test: report.statuses.get(test, "missing") for test in hidden.tests}
