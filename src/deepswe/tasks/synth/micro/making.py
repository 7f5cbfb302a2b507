"""Sets of micro tasks, large ones by several processes: each task is a function of its number alone.

A process is a plain interpreter that imports what makes tasks and nothing else. It is handed one run of numbers after
the other over a socket, and ends when the other end is closed, so also when whoever started it is killed.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, NamedTuple

from deepswe.cores import usable_cores
from deepswe.errors import DeepsweError, TaskError, boundary
from deepswe.progress import Progress, Silent
from deepswe.tasks.synth.micro.generate import count_by_split, micro_task
from deepswe.tasks.task import HiddenTests, Task, TaskSet

if TYPE_CHECKING:  # a process that makes tasks starts in half the time without it
    from deepswe.config import MicroTasks

WORTH_A_PROCESS = 250
"""Tasks that take about as long as two starts of a process."""
RUN = 50
"""Tasks that are asked for at once."""

_PROGRAM = f"""
import sys
sys.path[:] = sys.argv[2:]
from {__name__} import serve
serve(int(sys.argv[1]))
"""

Made = list[tuple[Task, HiddenTests]]


class _Run(NamedTuple):
    """Consecutive tasks of one split."""

    seed: int
    split: str
    first: int
    end: int

    def make(self) -> Made:
        return [micro_task(self.split, number, seed=self.seed) for number in range(self.first, self.end)]


def micro_task_set(config: MicroTasks, progress: Progress | None = None, *, processes: int | None = None) -> TaskSet:
    """All splits of the configured set. The same config gives the same set; a larger split extends a smaller one.

    Args:
        config: the settings.
        progress: told of what is made.
        processes: how many make it, 1 for this one alone; by default as many as there are cores and work for.

    Raises:
        TaskError: a task cannot be made, or a process that made them ended.
    """
    told = progress or Silent()
    counts = count_by_split(config)
    runs = [
        _Run(config.seed, split, first, min(first + RUN, count))
        for split, count in counts.items()
        for first in range(0, count, RUN)
    ]
    total = sum(counts.values())
    if processes is None:
        processes = min(usable_cores(), total // WORTH_A_PROCESS)
    told.begin("Micro tasks", total)
    made: dict[_Run, Made] = {}
    with closing(_by_processes(runs, processes) if processes > 1 else _here(runs)) as making:
        for run, tasks in making:
            made[run] = tasks
            told.advance(len(tasks))
    ordered = [pair for run in runs for pair in made[run]]
    return TaskSet(tasks=tuple(task for task, _ in ordered), hidden={task.id: tests for task, tests in ordered})


@dataclass(frozen=True, slots=True, eq=False)
class _Maker:
    """A process that makes tasks, and the socket to it."""

    process: subprocess.Popen[bytes]
    socket: Connection

    def ask(self, run: _Run) -> None:
        """Have it make these."""
        with self._alive():
            self.socket.send(run)

    def answer(self) -> Made:
        """What it made of the run that was asked for last."""
        with self._alive():
            answer: Made | DeepsweError = self.socket.recv()
        if isinstance(answer, DeepsweError):
            raise answer
        return answer

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise TaskError(
                f"a process that made micro tasks ended, with status {self.process.wait()}; see whether the machine "
                "ran out of memory, and start again"
            ) from error


@contextmanager
def _maker() -> Iterator[_Maker]:
    """A new process for the length of the block. It imports from where this one does."""
    ours, theirs = Pipe()
    with ours:
        with theirs, boundary("tasks.micro", TaskError):
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt at the terminal is for whoever waits for it
            )
        try:
            yield _Maker(process, ours)
        finally:
            process.kill()
            process.wait()


def _here(runs: Sequence[_Run]) -> Generator[tuple[_Run, Made], None, None]:
    for run in runs:
        yield run, run.make()


def _by_processes(runs: Sequence[_Run], processes: int) -> Generator[tuple[_Run, Made], None, None]:
    """Each run with its tasks, in the order in which they are done. No process outlives the iteration."""
    waiting = iter(runs)
    busy: dict[_Maker, _Run] = {}
    with ExitStack() as stack:

        def start(maker: _Maker) -> None:
            for run in itertools.islice(waiting, 1):
                maker.ask(run)
                busy[maker] = run

        for _ in range(processes):
            start(stack.enter_context(_maker()))
        while busy:
            ready = wait([maker.socket for maker in busy])
            for maker in [maker for maker in busy if maker.socket in ready]:
                run, tasks = busy.pop(maker), maker.answer()
                start(maker)
                yield run, tasks


def serve(descriptor: int) -> None:
    """Make the runs that come over a socket until its other end is closed."""
    with Connection(descriptor) as socket, suppress(EOFError, ConnectionError):
        while True:
            run: _Run = socket.recv()
            try:
                answer: Made | DeepsweError = run.make()
            except DeepsweError as error:
                answer = error
            socket.send(answer)
