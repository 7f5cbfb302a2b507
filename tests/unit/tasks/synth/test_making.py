"""Several processes make the set that one makes, and none of them outlives the making."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from deepswe.config import MicroTasks
from deepswe.errors import TaskError
from deepswe.progress import Silent
from deepswe.tasks.synth.micro import making
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.taskset import save_task_set

CONFIG = MicroTasks(train=130, heldout=55, unseen=7, seed=2)


class Counting(Silent):
    def __init__(self) -> None:
        self.total = self.done = 0

    def begin(self, stage: str, total: int) -> None:
        self.total = total

    def advance(self, pieces: int = 1, note: str = "") -> None:
        self.done += pieces


def started_by(pid: int) -> list[int]:
    found = (task / "children" for task in Path(f"/proc/{pid}/task").iterdir())
    return [int(child) for file in found for child in file.read_text().split()]


@pytest.fixture
def makers() -> Callable[[], list[int]]:
    """The processes that a test has started; others of this process, such as multiprocessing's own, go on beside it."""
    before = set(started_by(os.getpid()))
    return lambda: [pid for pid in started_by(os.getpid()) if pid not in before]


def test_three_processes_make_what_one_makes_byte_by_byte(tmp_path: Path, makers: Callable[[], list[int]]) -> None:
    progress = Counting()
    alone, together = micro_task_set(CONFIG, processes=1), micro_task_set(CONFIG, progress, processes=3)
    assert together == alone
    for name, tasks in (("alone.jsonl", alone), ("together.jsonl", together)):
        save_task_set(tasks, tmp_path / name)
    assert (tmp_path / "alone.jsonl").read_bytes() == (tmp_path / "together.jsonl").read_bytes()
    assert list(together.hidden) == list(alone.hidden) == [task.id for task in alone.tasks]
    assert (progress.done, progress.total) == (192, 192)
    assert not makers()


@pytest.mark.parametrize(("cores", "tasks"), [(1, 40), (64, 19)])
def test_few_tasks_or_one_core_start_no_process(monkeypatch: pytest.MonkeyPatch, cores: int, tasks: int) -> None:
    monkeypatch.setattr(making, "WORTH_A_PROCESS", 10)
    monkeypatch.setattr(making, "usable_cores", lambda: cores)
    monkeypatch.setattr(making, "_maker", lambda: pytest.fail("a process was started"))
    assert len(micro_task_set(MicroTasks(train=tasks, heldout=0, unseen=0)).tasks) == tasks


def test_a_process_that_dies_is_one_error_and_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, makers: Callable[[], list[int]]
) -> None:
    monkeypatch.setattr(making, "_PROGRAM", "import os; os._exit(3)")
    with pytest.raises(TaskError, match="a process that made micro tasks ended, with status 3; see whether"):
        micro_task_set(CONFIG, processes=2)
    assert not makers()


def test_a_process_that_died_before_it_was_asked_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "_PROGRAM", "import os; os._exit(3)")
    with making._maker() as maker:
        maker.process.wait()
        with pytest.raises(TaskError, match="ended, with status 3"):
            maker.ask(making._Run(0, "train", 0, 1))


def test_an_interpreter_that_does_not_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/none/python")
    with pytest.raises(TaskError, match=r"tasks\.micro: FileNotFoundError"):
        micro_task_set(CONFIG, processes=2)


def test_a_task_that_cannot_be_made_is_the_same_error_as_without_processes(makers: Callable[[], list[int]]) -> None:
    with (
        pytest.raises(TaskError, match="no split 'none'; use train"),
        closing(making._by_processes([making._Run(0, "none", 0, 1)], 1)) as made,
    ):
        next(made)
    assert not makers()


def test_whoever_stops_listening_leaves_no_process(makers: Callable[[], list[int]]) -> None:
    with closing(making._by_processes([making._Run(0, "train", first, first + 5) for first in range(9)], 2)) as made:
        next(made)
        assert len(makers()) == 2
    assert not makers()


def test_processes_end_with_a_killed_parent() -> None:
    program = """
from deepswe.config import MicroTasks
from deepswe.tasks.synth.micro.making import micro_task_set
micro_task_set(MicroTasks(train=100000, heldout=0, unseen=0), processes=2)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        deadline = time.monotonic() + 30
        while len(makers := started_by(parent.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    while any(running(pid) for pid in makers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether the process is there and no zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_imports_little() -> None:
    check = "import sys; sys.path[:] = sys.argv[1:]; import deepswe.tasks.synth.micro.making; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", check, *sys.path], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "pydantic", "asyncio"} & set(said.split())
