"""How far a verifier's probabilities can be believed: error by bins, area under the ROC curve, Brier score.

A verifier that gave no answer has no probability: such candidates are counted and are in none of the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

BINS = 10


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of one verifier over candidates with known outcomes.

    Attributes:
        candidates: with a probability and an outcome.
        missing: with an outcome, but without a probability.
        right: share of `candidates` that are right.
        ece: expected calibration error, in [0, 1].
        auroc: chance that a right candidate has a higher probability than a wrong one; None where one sort is absent.
        brier: mean squared error of the probabilities.
    """

    candidates: int
    missing: int
    right: float
    ece: float
    auroc: float | None
    brier: float


def calibrate(pairs: Iterable[tuple[float | None, float]]) -> Calibration | None:
    """All figures at once.

    Args:
        pairs: (probability or None, outcome 0 or 1) of each candidate.

    Returns:
        None where no candidate has a probability.
    """
    held = list(pairs)
    there = [(p, outcome) for p, outcome in held if p is not None and not math.isnan(p)]
    if not there:
        return None
    probabilities, outcomes = [p for p, _ in there], [outcome for _, outcome in there]
    return Calibration(
        candidates=len(there),
        missing=len(held) - len(there),
        right=fmean(outcomes),
        ece=expected_calibration_error(probabilities, outcomes),
        auroc=area_under_roc(probabilities, outcomes),
        brier=brier_score(probabilities, outcomes),
    )


def expected_calibration_error(probabilities: Sequence[float], outcomes: Sequence[float], *, bins: int = BINS) -> float:
    """Mean over candidates of |share of right ones - mean probability| in their bin (Guo et al. 2017, equation 3).

    Args:
        probabilities: in [0, 1], at least one; bins have equal width and 1.0 is in the last.
        outcomes: 0 or 1, as many.
        bins: how many.
    """
    filled: list[list[int]] = [[] for _ in range(bins)]
    for index, probability in enumerate(probabilities):
        filled[min(bins - 1, int(probability * bins))].append(index)
    gaps = (abs(math.fsum(outcomes[i] - probabilities[i] for i in held)) for held in filled)
    return math.fsum(gaps) / len(probabilities)


def area_under_roc(probabilities: Sequence[float], outcomes: Sequence[float]) -> float | None:
    """Chance that a right candidate is above a wrong one, a tie counting half (Mann-Whitney's U over all pairs).

    Args:
        probabilities: any real numbers.
        outcomes: 0 or 1, as many.

    Returns:
        None where all outcomes are alike.
    """
    right = sum(outcome >= 1.0 for outcome in outcomes)
    wrong = len(outcomes) - right
    if not right or not wrong:
        return None
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    ranks, start = 0.0, 0
    while start < len(order):
        end = start
        while end < len(order) and probabilities[order[end]] == probabilities[order[start]]:
            end += 1
        middle = (start + 1 + end) / 2.0
        ranks += middle * sum(outcomes[index] >= 1.0 for index in order[start:end])
        start = end
    return (ranks - right * (right + 1) / 2.0) / (right * wrong)


def brier_score(probabilities: Sequence[float], outcomes: Sequence[float]) -> float:
    """Mean squared difference of probability and outcome (Brier 1950, for two classes)."""
    return fmean((p - outcome) ** 2 for p, outcome in zip(probabilities, outcomes, strict=True))


def with_prior(probability: float, prior: float) -> float:
    """A probability learnt on as many right as wrong examples, for a pool with another share of right ones.

    Its odds are multiplied by the odds of the pool (King and Zeng 2001, section 4.1); the order never changes.

    Args:
        probability: of the balanced verifier.
        prior: share of right ones in the pool, in (0, 1).
    """
    yes, no = probability * prior, (1.0 - probability) * (1.0 - prior)
    return yes / (yes + no)
