"""Rates, bands, samplers and splits."""

from __future__ import annotations

from collections import Counter

import pytest

from deepswe.errors import TaskError
from deepswe.tasks.difficulty import (
    band_of,
    count_attempts,
    describe_rates,
    draw,
    split_by_repository,
    weights,
    with_rates,
)
from deepswe.tasks.task import HiddenTests, Measured, Repository, Task, TaskSet


def task_set(repos: str, measured: dict[str, Measured] | None = None) -> TaskSet:
    tasks = tuple(Task(f"t{at}", repo, "", Repository(), "test", "train") for at, repo in enumerate(repos))
    hidden = {task.id: HiddenTests(task.id, {}, ("a::b",), ()) for task in tasks}
    return TaskSet(tasks, hidden, measured or {})


def rated(*rates: tuple[int, int]) -> TaskSet:
    measured = {f"t{at}": Measured(attempts=attempts, solved=solved) for at, (attempts, solved) in enumerate(rates)}
    return task_set("a" * len(rates), measured)


@pytest.mark.parametrize(
    ("attempts", "solved", "band"),
    [
        (0, 0, "unrated"),
        (8, 0, "solve none"),
        (8, 1, "hard"),
        (8, 2, "hard"),
        (8, 3, "medium"),
        (8, 6, "medium"),
        (8, 7, "easy"),
        (8, 8, "solve all"),
    ],
)
def test_band_is_by_the_share_of_solved_attempts(attempts: int, solved: int, band: str) -> None:
    assert band_of(Measured(attempts=attempts, solved=solved)) == band


def test_attempts_without_a_verdict_do_not_count() -> None:
    assert count_attempts([("a", 1.0), ("a", None), ("a", 0.0), ("b", None)]) == {"a": (2, 1)}


def test_rates_replace_or_add_and_keep_what_validation_said() -> None:
    tasks = task_set("ab", {"t0": Measured("sound", attempts=4, solved=1, runtime_s=2.0)})
    replaced = with_rates(tasks, {"t0": (8, 8), "gone": (1, 1)})
    assert replaced.measured == {"t0": Measured("sound", attempts=8, solved=8, runtime_s=2.0)}
    added = with_rates(tasks, {"t0": (8, 8)}, add=True)
    assert added.measured["t0"] == Measured("sound", attempts=12, solved=9, runtime_s=2.0)


def test_description_names_solve_none_and_solve_all() -> None:
    told = describe_rates(rated((4, 0), (4, 4), (4, 2), (0, 0)))
    assert told["solve_none"] == ["t0"]
    assert told["solve_all"] == ["t1"]
    assert (told["tasks"], told["rated"], told["attempts"]) == (4, 3, 12)
    assert told["bands"] == {"solve none": 1, "hard": 0, "medium": 1, "easy": 0, "solve all": 1, "unrated": 1}


def test_weights_of_each_scheme() -> None:
    tasks = rated((4, 0), (4, 1), (4, 2), (4, 4), (0, 0))
    assert weights(tasks, "uniform") == (1, 1, 1, 1, 1)
    assert weights(tasks, "band", low=0.1, high=0.6, unrated=False) == (0, 1, 1, 0, 0)
    assert weights(tasks, "inverse") == (1.0, 0.75, 0.5, 0.05, 0.5)
    assert weights(tasks, "uncertain") == (0.05, 0.75, 1.0, 0.05, 1.0)


def test_draw_is_a_pure_function_of_step_and_seed_and_never_repeats_a_task() -> None:
    steps = [draw([1.0] * 10, count=4, step=step, seed=3) for step in range(20)]
    assert steps == [draw([1.0] * 10, count=4, step=step, seed=3) for step in range(20)]
    assert all(len(set(places)) == 4 for places in steps)
    assert len(set(steps)) > 15
    assert steps != [draw([1.0] * 10, count=4, step=step, seed=4) for step in range(20)]


def test_draw_follows_the_weights() -> None:
    counts = Counter(draw([3.0, 1.0, 0.0], count=1, step=step, seed=0)[0] for step in range(4000))
    assert counts[0] / 4000 == pytest.approx(0.75, abs=0.03)
    assert not counts[2]


def test_draw_refuses_more_tasks_than_the_sampler_leaves() -> None:
    with pytest.raises(TaskError, match="leaves only 1 of 2"):
        draw([1.0, 0.0], count=2, step=0, seed=0)


def test_split_keeps_every_repository_whole_and_comes_near_the_shares() -> None:
    tasks = split_by_repository(task_set("a" * 40 + "b" * 20 + "c" * 15 + "d" * 15 + "e" * 10), {"heldout": 0.25})
    assert len({(task.repo, task.split) for task in tasks.tasks}) == 5
    counts = Counter(task.split for task in tasks.tasks)
    assert 15 <= counts["heldout"] <= 35
    assert tasks == split_by_repository(tasks, {"heldout": 0.25})


def test_split_gives_every_split_a_repository_or_refuses() -> None:
    tasks = split_by_repository(task_set("a" * 98 + "bc"), {"heldout": 0.01, "unseen": 0.01})
    assert Counter(task.split for task in tasks.tasks) == {"train": 98, "heldout": 1, "unseen": 1}
    with pytest.raises(TaskError, match=r"1 repositories cannot be dealt out to 2 splits.*evaluation\.splits=\["):
        split_by_repository(task_set("aaa"), {"heldout": 0.5})
    with pytest.raises(TaskError, match="not between 0 and 1"):
        split_by_repository(task_set("abc"), {"heldout": 1.5})
