"""Metrics against hand arithmetic, and the intervals against simulated truth."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from deepswe.evaluation.metrics import (
    count_endings,
    count_grades,
    group_by,
    mean_pass_at_k,
    outcomes_by_task,
    paired_difference,
    pass_at_1,
    pass_at_k,
    student_quantile,
)
from deepswe.types import Ending, Grade, Graded, Trajectory, Ungraded


def attempt(task: str, number: int, grade: Grade, ending: Ending = Ending.SUBMITTED) -> Trajectory:
    return Trajectory(
        task_id=task, attempt=number, phase="before", step=0, spans=(), steps=(), ending=ending, grade=grade
    )


def test_pass_at_k_equals_enumeration_of_all_subsets() -> None:
    for n, c in [(1, 0), (4, 1), (5, 3), (6, 6)]:
        solved = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(solved, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_survives_large_counts() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(n, c, k)


def test_ungraded_attempts_are_left_out_and_never_zero() -> None:
    outcomes = outcomes_by_task(
        [
            attempt("a", 0, Graded(1.0)),
            attempt("a", 1, Ungraded("the sandbox died"), Ending.ERROR),
            attempt("b", 0, Graded(0.0)),
            attempt("c", 0, Ungraded("the sandbox died"), Ending.ERROR),
        ]
    )
    assert outcomes == {"a": [1.0], "b": [0.0], "c": []}
    estimate = pass_at_1(outcomes)
    assert (estimate.mean, estimate.tasks, estimate.attempts, estimate.tasks_without_verdict) == (0.5, 2, 2, 1)


def test_a_partial_reward_is_not_solved() -> None:
    assert outcomes_by_task([attempt("a", 0, Graded(0.99))]) == {"a": [0.0]}


def test_each_task_weighs_the_same_whatever_its_attempts() -> None:
    assert pass_at_1({"a": [1.0], "b": [0.0, 0.0, 0.0]}).mean == 0.5


def test_interval_of_pass_at_1_by_hand() -> None:
    # Task means 1, 0.5, 0: mean 0.5, variance of the mean 0.25 / 3, so 0.25 / (0.25 / 3) = 3 effective attempts of 6.
    estimate = pass_at_1({"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 0.0]})
    square = 4.302652729749464**2  # Student's 97.5% quantile with 2 degrees of freedom
    reach = math.sqrt(square) / (1 + square / 3) * math.sqrt(0.25 / 3 + square / 36)
    assert (estimate.low, estimate.high) == (pytest.approx(0.5 - reach), pytest.approx(0.5 + reach))


def test_interval_does_not_vanish_when_nothing_or_everything_is_solved() -> None:
    nothing = pass_at_1({str(i): [0.0] * 4 for i in range(100)})
    everything = pass_at_1({str(i): [1.0] * 4 for i in range(100)})
    assert (nothing.low, everything.high) == (0.0, 1.0)
    assert 0.02 < nothing.high < 0.05
    assert everything.low == pytest.approx(1.0 - nothing.high)


def test_one_task_says_nothing_about_others() -> None:
    estimate = pass_at_1({"a": [1.0, 0.0]})
    assert (estimate.mean, estimate.low, estimate.high) == (0.5, 0.0, 1.0)


def test_alike_attempts_of_a_task_do_not_narrow_the_interval() -> None:
    once = pass_at_1({str(i): [float(i % 2)] for i in range(40)})
    eight_times = pass_at_1({str(i): [float(i % 2)] * 8 for i in range(40)})
    assert (once.low, once.high) == (pytest.approx(eight_times.low), pytest.approx(eight_times.high))


@pytest.mark.parametrize("outcomes", [{}, {"a": []}])
def test_nothing_to_average_is_an_error(outcomes: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="none has a verdict"):
        pass_at_1(outcomes)


def test_outcomes_outside_the_unit_interval_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        pass_at_1({"a": [1.5]})


def test_mean_pass_at_k_leaves_out_tasks_with_too_few_verdicts() -> None:
    assert mean_pass_at_k({"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0]}, 2) == 0.5
    with pytest.raises(ValueError, match="pass@3"):
        mean_pass_at_k({"a": [1.0, 0.0]}, 3)


def test_paired_difference_by_hand() -> None:
    # Differences 0.5, 0.5, 0, 1: mean 0.5, deviation 1/sqrt(6), error 1/sqrt(24), t(3) = 3.182446.
    before = {"a": [0.0, 0.5], "b": [0.5], "c": [1.0], "d": [0.0], "only before": [1.0]}
    after = {"a": [0.75], "b": [1.0], "c": [1.0], "d": [1.0], "ungraded": []}
    difference = paired_difference(before, after)
    assert difference.mean == 0.5
    assert difference.low == pytest.approx(0.5 - 3.182446305 / math.sqrt(24))
    assert difference.high == 1.0  # 1.15, held inside the bounds
    assert (difference.tasks, difference.unpaired) == (4, 2)


def test_pairing_removes_the_spread_between_tasks() -> None:
    before = {str(i): [i / 100] for i in range(100)}
    after = {str(i): [min(1.0, i / 100 + 0.1 + 0.01 * (i % 2))] for i in range(80)}
    difference = paired_difference(before, after)
    assert difference.high - difference.low < 0.01


def test_equal_differences_do_not_give_an_interval_of_no_width() -> None:
    same = {str(i): [0.0] for i in range(10)}
    difference = paired_difference(same, same)
    unseen = 1 - 0.025**0.1  # the largest share that ten tasks would miss with probability 2.5%
    assert (difference.low, difference.high) == (pytest.approx(-unseen), pytest.approx(unseen))
    one_task = paired_difference({"a": [0.0]}, {"a": [1.0]})
    assert (one_task.low, one_task.high) == (pytest.approx(-0.95), 1.0)


def test_nothing_to_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="both sides"):
        paired_difference({"a": [1.0]}, {"b": [1.0]})


@pytest.mark.parametrize(
    ("degrees", "table"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (10, 2.22814), (30, 2.04227), (120, 1.97993)]
)
def test_student_quantile_is_the_table_value(degrees: int, table: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(table, rel=1e-5)
    assert student_quantile(0.025, degrees) == pytest.approx(-table, rel=1e-5)


def test_student_quantile_refuses_what_is_no_probability() -> None:
    with pytest.raises(ValueError, match="student_quantile"):
        student_quantile(1.0, 5)


@pytest.mark.parametrize(("easy", "hard", "share"), [(0.9, 0.1, 0.5), (0.3, 0.0, 0.3)])
def test_intervals_hold_the_truth_in_93_to_97_percent_of_simulated_evaluations(
    easy: float, hard: float, share: float
) -> None:
    """Tasks are easy or hard, drawn anew in each simulation; four attempts each; training adds 0.1 to every task."""
    generator = random.Random(7)
    truth = share * easy + (1 - share) * hard
    held_single = held_paired = 0
    simulations = 1000
    for _ in range(simulations):
        before: dict[str, list[float]] = {}
        after: dict[str, list[float]] = {}
        for task in range(40):
            chance = easy if generator.random() < share else hard
            before[str(task)] = [float(generator.random() < chance) for _ in range(4)]
            after[str(task)] = [float(generator.random() < chance + 0.1) for _ in range(4)]
        single, paired = pass_at_1(before), paired_difference(before, after)
        held_single += single.low <= truth <= single.high
        held_paired += paired.low <= 0.1 <= paired.high
    assert 0.93 <= held_single / simulations <= 0.97
    assert 0.93 <= held_paired / simulations <= 0.97


def test_counts_name_every_ending_and_grade() -> None:
    trajectories = [
        attempt("a", 0, Graded(1.0)),
        attempt("a", 1, Graded(0.0), Ending.MAX_STEPS),
        attempt("b", 0, Ungraded("no sandbox"), Ending.ERROR),
    ]
    assert count_endings(trajectories) == {
        "submitted": 1, "max_steps": 1, "max_context": 0, "generation_timeout": 0, "env_timeout": 0, "max_cost": 0,
        "error": 1,
    }  # fmt: skip
    assert count_grades(trajectories) == {"graded 1": 1, "graded 0": 1, "ungraded": 1}
    assert count_grades([attempt("a", 0, Graded(0.5))])["graded between"] == 1


def test_group_by_keeps_every_trajectory_once() -> None:
    trajectories = [attempt(task, n, Graded(0.0)) for n, task in enumerate("bab")]
    groups = group_by(trajectories, lambda t: t.task_id)
    assert {name: [t.attempt for t in group] for name, group in groups.items()} == {"a": [1], "b": [0, 2]}
