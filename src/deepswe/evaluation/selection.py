"""What a choice among K candidates is worth: Best@K beside Pass@K, over all subsets of a task's candidates.

Best@K of a method is the expected outcome of what it chooses from K candidates drawn without replacement from those
at hand; among candidates that it cannot tell apart the expected outcome is their mean. Where a task has few subsets
all of them are counted, so nothing is left to chance; else a seeded sample stands for them (the original samples
1,000). A candidate without a verdict has no outcome: it is left out and counted.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from deepswe.evaluation.metrics import Difference, Estimate, paired_difference, pass_at_1, pass_at_k
from deepswe.scaling.select import Scores, Selector, share_equal

EXACT_SUBSETS = 2_000
SAMPLED_SUBSETS = 1_000

Outcomes = Mapping[str, float]
"""Candidate -> 1.0 if it solves the task, 0.0 if not; a candidate without a verdict is not in it."""


@dataclass(frozen=True, slots=True)
class TaskCandidates:
    """One task's candidates, their scores and their outcomes."""

    task_id: str
    candidates: tuple[Scores, ...]
    outcomes: Outcomes

    def with_verdict(self) -> tuple[Scores, ...]:
        """The candidates that have an outcome, by name, so that no order of arrival can matter."""
        return tuple(sorted((c for c in self.candidates if c.candidate in self.outcomes), key=lambda c: c.candidate))


def best_at_k(task: TaskCandidates, selector: Selector, k: int, *, seed: int = 0) -> float:
    """Expected outcome of what `selector` chooses from k of the task's candidates.

    Equal patches share their scores inside each subset, as they would if only these candidates had been made.

    Args:
        task: at least k candidates with a verdict.
        selector: sees scores only.
        k: candidates drawn.
        seed: of the sample, where there are more than `EXACT_SUBSETS` subsets.

    Raises:
        ValueError: not 1 <= k <= candidates with a verdict.
    """
    candidates = task.with_verdict()
    n = len(candidates)
    if not 1 <= k <= n:
        raise ValueError(
            f"best@{k} of task {task.task_id!r} with {n} candidates that have a verdict; needs 1 <= k <= n"
        )
    if math.comb(n, k) <= EXACT_SUBSETS:
        subsets = itertools.combinations(candidates, k)
    else:
        rng = random.Random(f"{seed}/{task.task_id}/{k}")
        subsets = (tuple(rng.sample(candidates, k)) for _ in range(SAMPLED_SUBSETS))  # type: ignore[assignment]
    return fmean(_worth(selector(share_equal(subset)), task.outcomes) for subset in subsets)


def _worth(chosen: Sequence[Scores], outcomes: Outcomes) -> float:
    return fmean(outcomes[candidate.candidate] for candidate in chosen)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One K.

    Attributes:
        k: candidates a task.
        pass_at_k: the ceiling: a choice that is never wrong.
        best: method -> Best@K over tasks with its interval.
        gain: method -> Best@K less Pass@1, paired by task.
        tasks: tasks with at least K candidates that have a verdict; the others are left out of this point.
    """

    k: int
    pass_at_k: Estimate
    best: Mapping[str, Estimate]
    gain: Mapping[str, Difference]
    tasks: int


def scaling_curve(
    tasks: Sequence[TaskCandidates], selectors: Mapping[str, Selector], ks: Sequence[int], *, seed: int = 0
) -> list[CurvePoint]:
    """Pass@K and Best@K of each method, with 95% intervals over tasks.

    Args:
        tasks: each with its candidates.
        selectors: by name.
        ks: the numbers of candidates; one for which no task has enough is left out.
        seed: of sampled subsets.
    """
    points = []
    for k in ks:
        enough = [task for task in tasks if len(task.with_verdict()) >= k]
        if not enough:
            continue
        single = {task.task_id: [fmean(task.outcomes.values())] for task in enough}
        ceiling = {t.task_id: [pass_at_k(len(t.outcomes), int(sum(t.outcomes.values())), k)] for t in enough}
        chosen = {
            name: {task.task_id: [best_at_k(task, selector, k, seed=seed)] for task in enough}
            for name, selector in selectors.items()
        }
        points.append(
            CurvePoint(
                k,
                pass_at_1(ceiling),
                {name: pass_at_1(values) for name, values in chosen.items()},
                {name: paired_difference(single, values) for name, values in chosen.items()},
                len(enough),
            )
        )
    return points


def advise(points: Sequence[CurvePoint], method: str, *, share: float = 0.9) -> str:
    """One sentence: the fewest candidates that give most of what the most candidates give.

    Raises:
        ValueError: there is no point.
    """
    if not points:
        raise ValueError("no point of the curve, so there is nothing to advise")
    whole = points[-1].gain[method].mean
    if whole <= 0.0:
        return f"{method} gains nothing up to K={points[-1].k}; submit one candidate"
    first = next(point for point in points if point.gain[method].mean >= share * whole)
    return (
        f"K={first.k} gives {first.gain[method].mean / whole:.0%} of the gain of K={points[-1].k} by {method} "
        f"({100 * first.gain[method].mean:+.1f} of {100 * whole:+.1f} points)"
    )
