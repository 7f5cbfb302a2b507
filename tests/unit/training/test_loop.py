"""The order of tasks is a pure function of the step; a batch is summed up as it was."""

from collections import Counter

import pytest

from deepswe.errors import ConfigError
from deepswe.rollout.group import form_groups
from deepswe.training.loop import batch_metrics, choose_tasks
from deepswe.types import Ending, Graded, Step, TokenSpan, Trajectory, Ungraded
from tests.unit.rollout.guessing import Number

TASKS = tuple(Number(f"t{n}") for n in range(10))


def test_an_epoch_takes_each_task_at_most_once_and_the_next_one_in_another_order() -> None:
    first = [choose_tasks(TASKS, count=3, step=step, seed=1) for step in range(3)]
    second = [choose_tasks(TASKS, count=3, step=step, seed=1) for step in range(3, 6)]
    assert max(Counter(task.id for batch in first for task in batch).values()) == 1
    assert first != second
    assert first == [choose_tasks(TASKS, count=3, step=step, seed=1) for step in range(3)]
    assert first != [choose_tasks(TASKS, count=3, step=step, seed=2) for step in range(3)]


def test_a_batch_larger_than_the_task_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="only 10 training tasks"):
        choose_tasks(TASKS, count=11, step=0, seed=1)


def test_band_of_tasks_has_epochs_of_its_own_and_other_tasks_never_come() -> None:
    weights = [0.0, 1.0] * 5
    steps = [choose_tasks(TASKS, count=2, step=step, seed=1, weights=weights) for step in range(6)]
    assert max(Counter(task.id for batch in steps[:2] for task in batch).values()) == 1
    assert {task.id for batch in steps for task in batch} == {f"t{n}" for n in range(1, 10, 2)}
    with pytest.raises(ConfigError, match="the sampler leaves 5"):
        choose_tasks(TASKS, count=6, step=0, seed=1, weights=weights)


def test_weighted_choice_is_a_pure_function_of_the_step() -> None:
    weights = [1.0] * 9 + [20.0]
    steps = [choose_tasks(TASKS, count=2, step=step, seed=1, weights=weights) for step in range(30)]
    assert steps == [choose_tasks(TASKS, count=2, step=step, seed=1, weights=weights) for step in range(30)]
    assert sum(TASKS[9] in batch for batch in steps) > 20
    assert all(len({task.id for task in batch}) == 2 for batch in steps)


def attempt(task: str, number: int, grade: Graded | Ungraded, ending: Ending = Ending.SUBMITTED) -> Trajectory:
    spans = (TokenSpan((1, 2, 3), False), TokenSpan((4,), True, (-1.0,)))
    return Trajectory(task, number, "train", 0, spans, (Step("x", None, ""),), ending, grade)


def test_a_batch_is_counted_by_group_and_ending_and_ungraded_attempts_move_no_mean() -> None:
    groups = form_groups(
        [
            attempt("a", 0, Graded(1.0)),
            attempt("a", 1, Graded(0.0), Ending.MAX_STEPS),
            attempt("b", 0, Graded(1.0)),
            attempt("b", 1, Ungraded("died"), Ending.ERROR),
            attempt("c", 0, Graded(0.0)),
            attempt("c", 1, Graded(0.0)),
        ]
    )
    row = batch_metrics(groups)
    assert row["reward_mean"] == 2 / 5
    assert row["graded"] == 5
    assert (row["solved_all"], row["solved_some"], row["solved_none"]) == (1, 1, 1)
    assert (row["ending/submitted"], row["ending/max_steps"], row["ending/error"]) == (4, 1, 1)
    assert (row["length_mean"], row["sampled_mean"], row["steps_mean"]) == (4.0, 1.0, 1.0)
