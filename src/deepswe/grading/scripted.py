"""Grade by a source's own test script: lay the hidden tests, run the script, read its log."""

from __future__ import annotations

from deepswe.errors import GradingError, boundary
from deepswe.grading.parsers import Reading, read_log
from deepswe.grading.tree import ROOT
from deepswe.sandbox.base import Sandbox
from deepswe.tasks.task import HiddenTests, Task
from deepswe.types import Grade, Graded, Ungraded

APPLY_TIMEOUT_S = 120.0
SCRIPT = "/tmp/deepswe-eval.sh"
LOG = "/tmp/deepswe-eval.log"
MAX_LOG_BYTES = 64 << 20
_NOT_RUN = (126, 127)


async def grade_by_script(sandbox: Sandbox, task: Task, hidden: HiddenTests) -> Grade:
    """The verdict of a script in a sandbox in which the tree and the agent's patch are laid.

    Args:
        sandbox: of the task's image; nothing of the agent's sandbox is in it but the patch.
        task: whose.
        hidden: the script, its parser, and the tests that it needs. Paths of `files` may be absolute here.

    Raises:
        GradingError: the hidden tests cannot be laid, or the script did not run.
        SandboxError: the sandbox failed.
    """
    with boundary("grading.tests", GradingError):
        files = {_place(path): text.encode() for path, text in hidden.files.items()}
        await sandbox.write_files({**files, SCRIPT: hidden.script.encode()})
        if hidden.test_patch.strip():
            await _apply_tests(sandbox, hidden.test_patch)
    with boundary("grading.run", GradingError):
        command = f"exec bash {SCRIPT} > {LOG} 2>&1"
        result = await sandbox.exec(["sh", "-c", command], timeout_s=hidden.timeout_s)
        if result.timed_out:
            return Graded(0.0, _missing(hidden), f"the tests took more than {hidden.timeout_s:.0f} s")
        try:
            log = (await sandbox.read_file(LOG, max_bytes=MAX_LOG_BYTES)).decode("utf-8", "replace")
        except ValueError:
            return Graded(0.0, _missing(hidden), f"the log of the tests has more than {MAX_LOG_BYTES >> 20} MiB")
    reading = read_log(log, task, hidden)
    if result.exit_code in _NOT_RUN and all(status == "missing" for status in reading.statuses.values()):
        return Ungraded(f"the test script did not run (exit code {result.exit_code}): {log[-500:]}", "grading.runner")
    return verdict(reading, hidden)


def verdict(reading: Reading, hidden: HiddenTests) -> Graded:
    """Reward 1 if every graded test is right and the log as a whole gives no reason against it."""
    wrong = [test for test in hidden.tests if test not in reading.right]
    if reading.problem:
        return Graded(0.0, reading.statuses, reading.problem)
    if wrong:
        first = f"{wrong[0]} {reading.statuses[wrong[0]]}"
        return Graded(
            0.0, reading.statuses, f"{len(wrong)} of {len(hidden.tests)} tests are not as they must be: {first}"
        )
    return Graded(1.0, reading.statuses)


async def _apply_tests(sandbox: Sandbox, patch: str) -> None:
    """The agent's patch never touches these files, so a patch of tests that does not apply is the task's fault."""
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    result = await sandbox.exec(command, timeout_s=APPLY_TIMEOUT_S, stdin=patch.encode())
    if result.exit_code:
        raise GradingError(f"the hidden tests do not apply: {result.stderr.decode('utf-8', 'replace').strip()[-500:]}")


def _place(path: str) -> str:
    return path if path.startswith("/") else f"{ROOT}/{path}"


def _missing(hidden: HiddenTests) -> dict[str, str]:
    return dict.fromkeys(hidden.tests, "missing")
