"""Faults of the infrastructure in every stage of grading: none may become a reward, nor a zero that was not earned.

The gold patches of micro tasks are graded while something breaks: the start of the sandbox, the tree, git, the hidden
tests, the run, its report. Most faults are injected between the grader and a real sandbox; some are made for real (a
sandbox that is killed while tests run, a disk that is full, a start that takes too long). Then tests that run too long:
those are worth 0, and are no fault. The last line printed is one JSON object:

    faults      gradings in which something broke
    rewarded    of these, with a reward above 0
    ungraded    of these, without a verdict, with a cause and a place
    mistyped    of these, anything else; and tests that ran too long without being graded 0
    by_fault    fault -> gradings
    too_long    gradings of tests that run too long, all graded 0 if `mistyped` is 0
    wall_s      seconds for everything

Exit code 0 if every fault is ungraded and nothing is mistyped. `--quick` takes 30 faults.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepswe.cli.progress import TerminalProgress
from deepswe.config import MicroTasks, SandboxConfig
from deepswe.errors import SandboxDied, SandboxError, SandboxStartError
from deepswe.grading.grade import grade
from deepswe.grading.tree import Workshop
from deepswe.progress import Progress
from deepswe.sandbox.base import ExecResult, Sandbox, SandboxSpec
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.task import HiddenTests, Task
from deepswe.types import Grade, Graded, Ungraded

TREE, APPLY, TESTS, RUN = "tree", "apply", "tests", "run"
"""What one grading does, in order: write and execute git in one request, write and execute the runner in another."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What breaks: before a call, it raises; after it, the result is changed."""

    stage: str
    name: str
    error: Callable[[], Exception] | None = None
    change: Callable[[ExecResult, random.Random], ExecResult] | None = None


def died() -> Exception:
    return SandboxDied("sandbox x has ended")


def os_error(number: int) -> Callable[[], Exception]:
    return lambda: OSError(number, errno.errorcode[number], "/testbed/x")


def ended(code: int, *, words: str = "", late: bool = False) -> Callable[[ExecResult, random.Random], ExecResult]:
    """The command did nothing and ended with this code."""
    return lambda result, rng: ExecResult(code, b"", words.encode(), timed_out=late)


def cut(result: ExecResult, rng: random.Random) -> ExecResult:
    """The reporter was killed in the middle: what it wrote is cut off at any byte."""
    return replace(result, exit_code=137, channel=result.channel[: rng.randrange(len(result.channel))])


def lost(result: ExecResult, rng: random.Random) -> ExecResult:
    """A piece of the report is lost on its way, its end with it."""
    lines = result.channel.split(b"\n")
    return replace(result, channel=b"\n".join([*lines[: rng.randrange(1, len(lines) - 2)], b""]))


def garbled(result: ExecResult, rng: random.Random) -> ExecResult:
    """A byte of the report is another."""
    at = rng.randrange(len(result.channel) - 1)
    return replace(result, channel=result.channel[:at] + b"\x00" + result.channel[at + 1 :])


FAULTS: tuple[Fault, ...] = (
    Fault("open", "no sandbox starts", lambda: SandboxStartError("did not start within 30 s")),
    Fault("open", "the launcher is gone", lambda: SandboxError("the sandbox launcher is gone")),
    Fault("open", "no memory", lambda: MemoryError("fork")),
    Fault(TREE, "the sandbox dies", died),
    Fault(TREE, "the disk is full", os_error(errno.ENOSPC)),
    Fault(TREE, "the disk is broken", os_error(errno.EIO)),
    Fault(APPLY, "the sandbox dies", died),
    Fault(APPLY, "git is killed", change=ended(137)),
    Fault(APPLY, "git is missing", change=ended(127)),
    Fault(APPLY, "git is slow", change=ended(137, late=True)),
    Fault(APPLY, "git crashes", change=ended(139)),
    Fault(APPLY, "the disk is full", change=ended(1, words="error: unable to write file x: No space left on device")),
    Fault(APPLY, "the disk is read-only", change=ended(128, words="fatal: cannot open x: Read-only file system")),
    Fault(APPLY, "no memory", change=ended(128, words="fatal: Out of memory, malloc failed: Cannot allocate memory")),
    Fault(TESTS, "the sandbox dies", died),
    Fault(TESTS, "the disk is full", os_error(errno.ENOSPC)),
    Fault(TESTS, "the disk is read-only", os_error(errno.EROFS)),
    Fault(RUN, "the sandbox dies", died),
    Fault(RUN, "the call fails", lambda: SandboxError("could not run 'python3'")),
    Fault(RUN, "python is missing", change=ended(127, words="python3: command not found")),
    Fault(RUN, "python is killed at its start", change=ended(137)),
    Fault(RUN, "python crashes at its start", change=ended(139)),
    Fault(RUN, "the start takes too long", change=ended(137, late=True)),
    Fault(RUN, "the reporter is killed", change=cut),
    Fault(RUN, "the report is lost", change=lost),
    Fault(RUN, "the report is garbled", change=garbled),
)


class Broken:
    """A sandbox between which and the grader one thing breaks."""

    def __init__(self, inner: Sandbox, fault: Fault, rng: random.Random) -> None:
        self.inner, self.fault, self.rng = inner, fault, rng
        self.writes = iter((TREE, TESTS))
        self.runs = iter((APPLY, RUN))

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        assert options["files"]
        if next(self.writes) == self.fault.stage and self.fault.error is not None:
            raise self.fault.error()
        here = next(self.runs) == self.fault.stage
        if here and self.fault.error is not None:
            raise self.fault.error()
        result = await self.inner.exec(argv, **options)
        return self.fault.change(result, self.rng) if here and self.fault.change is not None else result


def breaking(workshop: Workshop, fault: Fault, rng: random.Random) -> Workshop:
    """The workshop with one fault in it."""

    @asynccontextmanager
    async def open_sandbox(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        if fault.stage == "open" and fault.error is not None:
            raise fault.error()
        async with workshop.open_sandbox(spec) as sandbox:
            yield Broken(sandbox, fault, rng)  # type: ignore[misc]

    return replace(workshop, open_sandbox=open_sandbox)


async def killed_while_running(workshop: Workshop, task: Task, hidden: HiddenTests) -> Grade:
    """The whole sandbox is ended from outside while its tests run."""
    started = asyncio.Event()
    held: list[Any] = []

    @asynccontextmanager
    async def open_sandbox(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with workshop.open_sandbox(spec) as sandbox:
            held.append(sandbox)
            started.set()
            yield sandbox

    slow = "import time\ntime.sleep(60)\n"
    files = {path: slow + text for path, text in hidden.files.items()}
    work = asyncio.ensure_future(
        grade(hidden.gold_patch, task, replace(hidden, files=files), replace(workshop, open_sandbox=open_sandbox))
    )
    await started.wait()
    await asyncio.sleep(0.5)
    held[0]._launcher.kill(held[0].id)
    return await work


async def full_disk(workshop: Workshop, task: Task, hidden: HiddenTests) -> Grade:
    """The sandbox's disk has no room for the tree."""
    big = replace(task, repository=replace(task.repository, files={**task.repository.files, "big": "x" * (3 << 20)}))
    return await grade(hidden.gold_patch, big, hidden, replace(workshop, limits=replace(workshop.limits, disk_mib=1)))


async def late_start(workshop: Workshop, task: Task, hidden: HiddenTests) -> Grade:
    """No sandbox can start in a millisecond."""
    async with SandboxPool(SandboxConfig(start_timeout_s=0.001, memory_mib=700), "faults-late") as pool:
        return await grade(hidden.gold_patch, task, hidden, replace(workshop, open_sandbox=pool.open))


async def too_long(workshop: Workshop, task: Task, hidden: HiddenTests) -> Grade:
    """The tests do not end in time, by the doing of the code."""
    files = {
        path: text + "\n\nwhile True:\n    pass\n" for path, text in task.repository.files.items() if ".py" in path
    }
    endless = replace(task, repository=replace(task.repository, files={**task.repository.files, **files}))
    return await grade("", endless, replace(hidden, timeout_s=3.0), workshop)


REAL: Mapping[str, Callable[[Workshop, Task, HiddenTests], Any]] = {
    "really killed while tests run": killed_while_running,
    "really a full disk": full_disk,
    "really a late start": late_start,
}


def is_ungraded(verdict: Grade) -> bool:
    return isinstance(verdict, Ungraded) and bool(verdict.error) and bool(verdict.place)


async def measure(faults: int, progress: Progress) -> dict[str, Any]:
    """Break `faults` gradings."""
    started = time.monotonic()
    tasks = micro_task_set(MicroTasks(train=24, heldout=0, unseen=0))
    config = SandboxConfig()
    real = max(3, faults // 25)
    kinds: Counter[str] = Counter()
    verdicts: list[tuple[str, Grade]] = []
    async with SandboxPool(config, "faults") as pool:
        workshop = Workshop(pool.open, Path, limits_of(config))
        slots = asyncio.Semaphore(4)
        progress.begin("Faults", faults)

        async def one(number: int) -> None:
            task = tasks.tasks[number % len(tasks.tasks)]
            hidden = tasks.hidden[task.id]
            rng = random.Random(number)
            async with slots:
                if number < real:
                    name = list(REAL)[number % len(REAL)]
                    verdict = await REAL[name](workshop, task, hidden)
                else:
                    fault = FAULTS[number % len(FAULTS)]
                    name = f"{fault.stage}: {fault.name}"
                    verdict = await grade(hidden.gold_patch, task, hidden, breaking(workshop, fault, rng))
            kinds[name] += 1
            verdicts.append((name, verdict))
            progress.advance()

        await asyncio.gather(*(one(number) for number in range(faults)))
        slow = [await too_long(workshop, task, tasks.hidden[task.id]) for task in tasks.tasks[: 1 + faults // 100]]
    odd = [(name, verdict) for name, verdict in verdicts if not is_ungraded(verdict)]
    for name, verdict in odd[:10]:
        progress.say(f"{name}: {verdict}")
    wrong = sum(not isinstance(v, Graded) or v.reward != 0 or "took more than" not in v.reason for v in slow)
    return {
        "faults": len(verdicts),
        "rewarded": sum(isinstance(verdict, Graded) and verdict.reward > 0 for _, verdict in verdicts),
        "ungraded": len(verdicts) - len(odd),
        "mistyped": len(odd) + wrong,
        "by_fault": dict(sorted(kinds.items())),
        "too_long": len(slow),
        "wall_s": round(time.monotonic() - started, 1),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 faults")
    quick = parser.parse_args().quick
    with TerminalProgress() as progress:
        figures = asyncio.run(measure(30 if quick else 500, progress))
    print(json.dumps(figures))
    return 0 if figures["ungraded"] == figures["faults"] and not figures["mistyped"] else 1


if __name__ == "__main__":
    sys.exit(main())
