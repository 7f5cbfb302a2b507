"""Pass rates out of the trajectories of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepswe.cli.app import build_app
from deepswe.errors import RunError
from deepswe.evaluation.rate import rates_of_runs
from deepswe.rollout.store import TrajectoryStore
from deepswe.tasks.task import HiddenTests, Repository, Task, TaskSet
from deepswe.tasks.taskset import load_task_set, save_task_set
from deepswe.types import Ending, Graded, Step, TokenSpan, Trajectory, Ungraded


def record(run: Path, phase: str, *rows: tuple[str, float | None]) -> None:
    segment, _ = TrajectoryStore(run).begin(phase, 0, keep=True)
    with segment:
        for number, (task, reward) in enumerate(rows):
            grade = Ungraded("gone", "grading") if reward is None else Graded(reward)
            spans = (TokenSpan((1,), False), TokenSpan((2,), True, (-1.0,)))
            steps = (Step("x", None, ""),)
            segment.append(Trajectory(task, number, phase, 0, spans, steps, Ending.SUBMITTED, grade))
        segment.commit()


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    record(first, "train", ("a", 1.0), ("a", 0.0), ("b", 0.0), ("b", None))
    record(first, "reference_train", ("a", 1.0), ("b", 1.0))
    record(first, "imitation", ("a", None))
    record(second, "after_heldout", ("b", 0.0), ("c", 1.0))
    return [first, second]


def test_attempts_of_a_model_are_counted_and_those_of_scripts_and_without_verdict_are_not(runs: list[Path]) -> None:
    assert rates_of_runs(runs) == {"a": (2, 1), "b": (2, 0), "c": (1, 1)}
    assert rates_of_runs(runs, phase="after") == {"b": (1, 0), "c": (1, 1)}


def test_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run directory"):
        rates_of_runs([tmp_path])


def test_command_writes_the_rates_into_the_set_and_names_solve_none_and_solve_all(
    runs: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "set.jsonl"
    tasks = tuple(Task(name, name, "", Repository(), "test", "train") for name in "abcd")
    save_task_set(TaskSet(tasks, {name: HiddenTests(name, {}, ("t",), ()) for name in "abcd"}), path)
    done = CliRunner().invoke(build_app(), ["tasks", "rate", str(path), *map(str, runs)])
    told = json.loads(done.stdout)
    assert (told["rated"], told["solve_none"], told["solve_all"]) == (3, ["b"], ["c"])
    assert load_task_set(path).measured["a"].pass_rate == 0.5
    done = CliRunner().invoke(build_app(), ["tasks", "split", str(path), "--heldout", "0.25"])
    assert json.loads(done.stdout) == {"train": 3, "heldout": 1}
    assert load_task_set(path).measured["a"].attempts == 2
