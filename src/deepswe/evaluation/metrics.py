"""What an evaluation says: pass@k, intervals that respect tasks, and counts. Standard library only.

Two rules hold everywhere. The unit of sampling is the task, not the attempt: attempts at one task are alike, so
intervals come from the spread between tasks. And an attempt without a verdict is never scored 0: it is left out of
every mean and counted beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

from deepswe.types import Ending, Trajectory

CONFIDENCE = 0.95

TASKS_A_GROUP = 2
"""Tasks that a group has on average, at least, to be worth a row in a table by group."""

Outcomes = Mapping[str, Sequence[float]]
"""Task id -> a number in [0, 1] per attempt that has a verdict."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its 95% interval.

    Attributes:
        mean: over tasks, of the mean over attempts.
        low, high: the interval, inside [0, 1].
        tasks: tasks with at least one verdict; the mean is over these.
        attempts: verdicts.
        tasks_without_verdict: tasks left out because none of their attempts has a verdict.
    """

    mean: float
    low: float
    high: float
    tasks: int
    attempts: int
    tasks_without_verdict: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """After minus before, paired by task, with its 95% interval.

    Attributes:
        mean: over tasks, of the difference of the task's two means.
        low, high: the interval, inside [-1, 1].
        tasks: tasks with a verdict on both sides; the mean is over these.
        unpaired: tasks left out because one side has no verdict.
    """

    mean: float
    low: float
    high: float
    tasks: int
    unpaired: int = 0


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k attempts solves the task (Chen et al. 2021, section 2.1).

    Args:
        n: attempts that have a verdict.
        c: of these, the ones that solved it.
        k: attempts allowed.

    Raises:
        ValueError: not 0 <= c <= n or not 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"pass_at_k: {c} solved of {n} attempts is impossible; give 0 <= c <= n")
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: k={k} with {n} attempts; the estimate needs 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def outcomes_by_task(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Task id -> 1.0 for each attempt with the full reward and 0.0 for each other attempt with a verdict.

    Ungraded attempts are left out; a task that has only such attempts is there with an empty list.
    """
    outcomes: dict[str, list[float]] = {}
    for trajectory in trajectories:
        scores = outcomes.setdefault(trajectory.task_id, [])
        if trajectory.reward is not None:
            scores.append(float(trajectory.reward >= 1.0))
    return outcomes


def pass_at_1(outcomes: Outcomes) -> Estimate:
    """Mean over tasks of the mean over attempts, each task weighing the same, with a task-clustered 95% interval.

    The interval is Wilson's with the effective number of attempts of a cluster sample, p(1-p) / SE^2, and Student's
    quantile with tasks - 1 degrees of freedom (Korn and Graubard 1998; Dean and Pagano 2015, "modified Wilson"). So it
    stays inside [0, 1] and does not vanish at 0 or 1, where the effective number is the number of tasks.
    One task alone says nothing about others: its interval is [0, 1].

    Args:
        outcomes: as of `outcomes_by_task`; tasks with an empty list are left out and counted.

    Raises:
        ValueError: no task has a verdict, or a value is outside [0, 1].
    """
    means = _task_means(outcomes)
    if not means:
        raise ValueError(f"pass@1 of {len(outcomes)} tasks: none has a verdict, so there is nothing to average")
    mean = fmean(means.values())
    tasks = len(means)
    attempts = sum(len(outcomes[task]) for task in means)
    left_out = len(outcomes) - tasks
    if tasks == 1:
        return Estimate(mean, 0.0, 1.0, tasks, attempts, left_out)
    spread = mean * (1.0 - mean)
    variance = stdev(means.values()) ** 2 / tasks
    if spread < 1e-12:
        effective = float(tasks)
    else:
        effective = min(spread / variance, float(attempts)) if variance > 0 else float(attempts)
    low, high = _wilson(mean, effective, student_quantile(0.5 + CONFIDENCE / 2, tasks - 1))
    return Estimate(mean, low, high, tasks, attempts, left_out)


def mean_pass_at_k(outcomes: Outcomes, k: int) -> float:
    """Mean over tasks of `pass_at_k`. Tasks with fewer than k verdicts have no unbiased estimate and are left out.

    Raises:
        ValueError: no task has k verdicts.
    """
    values = [
        pass_at_k(len(scores), sum(s >= 1.0 for s in scores), k) for scores in outcomes.values() if len(scores) >= k
    ]
    if not values:
        raise ValueError(f"pass@{k} of {len(outcomes)} tasks: none has {k} attempts with a verdict")
    return fmean(values)


def paired_difference(before: Outcomes, after: Outcomes) -> Difference:
    """How much better `after` is, paired by task, with a 95% interval.

    The interval is Student's for the mean of the per-task differences. Where all of these are equal their spread
    cannot be estimated; the interval is then the exact one for "no other value was seen in n tasks": a share of up to
    u = 1 - 0.025^(1/n) of all tasks may differ, by as much as the bounds -1 and 1 allow.

    Args:
        before, after: as of `outcomes_by_task`. A task without a verdict on one side is left out and counted.

    Raises:
        ValueError: no task has a verdict on both sides, or a value is outside [0, 1].
    """
    first, second = _task_means(before), _task_means(after)
    shared = [task for task in first if task in second]
    unpaired = len(before.keys() | after.keys()) - len(shared)
    if not shared:
        raise ValueError(f"paired difference of {len(before)} and {len(after)} tasks: none has a verdict on both sides")
    differences = [second[task] - first[task] for task in shared]
    mean = fmean(differences)
    n = len(shared)
    error = stdev(differences) / math.sqrt(n) if n > 1 else 0.0
    if error < 1e-12:
        unseen = 1.0 - ((1.0 - CONFIDENCE) / 2) ** (1.0 / n)
        low, high = mean - unseen * (mean + 1.0), mean + unseen * (1.0 - mean)
    else:
        reach = student_quantile(0.5 + CONFIDENCE / 2, n - 1) * error
        low, high = mean - reach, mean + reach
    return Difference(mean, max(low, -1.0), min(high, 1.0), n, unpaired)


def count_endings(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """How many ended in each way; every ending is named, in the order of `Ending`, also with 0."""
    counts = Counter(trajectory.ending for trajectory in trajectories)
    return {ending.value: counts[ending] for ending in Ending}


def count_grades(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """How many got which grade: "graded 1", "graded 0", "ungraded", and "graded between" where partial rewards occur.

    "ungraded" is no kind of failure of the policy: it is the number that every mean leaves out.
    """
    counts = Counter(_grade_name(trajectory.reward) for trajectory in trajectories)
    names = ["graded 1", "graded 0", *(["graded between"] if counts["graded between"] else []), "ungraded"]
    return {name: counts[name] for name in names}


def group_by(trajectories: Iterable[Trajectory], key: Callable[[Trajectory], str]) -> dict[str, tuple[Trajectory, ...]]:
    """The trajectories of each value of `key`, values sorted."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(key(trajectory), []).append(trajectory)
    return {name: tuple(groups[name]) for name in sorted(groups)}


@lru_cache(maxsize=1024)
def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, right to about 1e-9, by bisection of its distribution function.

    Raises:
        ValueError: not 0 < probability < 1 or degrees < 1.
    """
    if not 0.0 < probability < 1.0 or degrees < 1:
        raise ValueError(f"student_quantile({probability}, {degrees}): needs 0 < probability < 1 and degrees >= 1")
    if probability < 0.5:
        return -student_quantile(1.0 - probability, degrees)
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2.0
    while high - low > 1e-10 * max(1.0, high):
        middle = (low + high) / 2.0
        if _student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def _student_cdf(t: float, degrees: int) -> float:
    """Distribution function at t >= 0: the finite trigonometric sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = cosine if degrees % 2 else 1.0
    total = 0.0
    for step in range(3 if degrees % 2 else 2, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (step - 1) / step
    inside = (2.0 / math.pi) * (angle + sine * total) if degrees % 2 else sine * total
    return 0.5 + inside / 2.0


def _wilson(mean: float, n: float, quantile: float) -> tuple[float, float]:
    square = quantile * quantile
    centre = (mean + square / (2.0 * n)) / (1.0 + square / n)
    reach = quantile / (1.0 + square / n) * math.sqrt(mean * (1.0 - mean) / n + square / (4.0 * n * n))
    return max(0.0, min(mean, centre - reach)), min(1.0, max(mean, centre + reach))


def _task_means(outcomes: Outcomes) -> dict[str, float]:
    for task, scores in outcomes.items():
        for score in scores:
            if not 0.0 <= score <= 1.0:
                raise ValueError(f"task {task!r} has the outcome {score}; outcomes lie in [0, 1]")
    return {task: fmean(scores) for task, scores in outcomes.items() if scores}


def _grade_name(reward: float | None) -> str:
    if reward is None:
        return "ungraded"
    if reward >= 1.0:
        return "graded 1"
    return "graded 0" if reward <= 0.0 else "graded between"
