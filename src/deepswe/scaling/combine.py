"""A learned choice: a logistic model over all scores, fitted on tasks whose outcomes are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepswe.errors import ConfigError
from deepswe.scaling.select import Scores

FEATURES = ("bias", "verifier log-odds", "regression share", "generated share", "patch share", "missing scores")


@dataclass(frozen=True, slots=True)
class Combination:
    """A fitted model; as a selector it takes the candidates of the highest probability.

    Attributes:
        weights: one for each of `FEATURES`.
    """

    weights: tuple[float, ...]

    def probabilities(self, candidates: Sequence[Scores]) -> list[float]:
        """That each of a task's candidates is right, given all of them."""
        scores = _features(candidates) @ np.asarray(self.weights)
        return [float(p) for p in 1.0 / (1.0 + np.exp(-np.clip(scores, -30.0, 30.0)))]

    def __call__(self, candidates: Sequence[Scores]) -> tuple[Scores, ...]:
        """The best of them; those that differ by rounding only are equal."""
        values = [round(p, 12) for p in self.probabilities(candidates)]
        return tuple(c for c, value in zip(candidates, values, strict=True) if value == max(values))


def fit_combination(
    tasks: Sequence[tuple[Sequence[Scores], Mapping[str, float]]], *, ridge: float = 1.0
) -> Combination:
    """Fit by Newton's method on the ridge-penalised likelihood. Each task weighs the same, whatever its candidates.

    Args:
        tasks: for each, its candidates, and the outcome (0 or 1) by candidate of those that have a verdict.
        ridge: penalty on the squared weights, the bias apart.

    Raises:
        ConfigError: no candidate has an outcome.
    """
    rows: list[npt.NDArray[np.float64]] = []
    outcomes: list[float] = []
    shares: list[float] = []
    for candidates, known in tasks:
        for features, candidate in zip(_features(candidates), candidates, strict=True):
            if candidate.candidate in known:
                rows.append(features)
                outcomes.append(known[candidate.candidate])
                shares.append(1.0 / len(known))
    if not rows:
        raise ConfigError("a combination is fitted on candidates with known outcomes; none of the given ones has one")
    x, y, share = np.stack(rows), np.asarray(outcomes), np.asarray(shares)
    penalty = np.diag([1e-9] + [ridge] * (len(FEATURES) - 1))
    weights = np.zeros(len(FEATURES))
    for _ in range(100):
        chance = 1.0 / (1.0 + np.exp(-np.clip(x @ weights, -30.0, 30.0)))
        gradient = x.T @ (share * (y - chance)) - penalty @ weights
        curvature = (x * (share * chance * (1.0 - chance))[:, None]).T @ x + penalty
        step = np.linalg.solve(curvature, gradient)
        weights = weights + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-9:
            break
    return Combination(tuple(float(w) for w in weights))


def _features(candidates: Sequence[Scores]) -> npt.NDArray[np.float64]:
    """(candidates, features). A missing score is the middle of the others, and counted in the last feature."""
    verifier = _filled([None if c.verifier is None else _log_odds(c.verifier) for c in candidates])
    regression = _filled([c.regression for c in candidates])
    generated = _filled(
        [None if c.reproduction is None else (c.reproduced or 0.0) / max(1, len(c.reproduction)) for c in candidates]
    )
    same = [sum(other.patch == c.patch for other in candidates) / len(candidates) for c in candidates]
    missing = [float((c.verifier is None) + (c.regression is None) + (c.reproduction is None)) for c in candidates]
    columns = [[1.0] * len(candidates), verifier, regression, generated, same, missing]
    return np.asarray(columns, dtype=np.float64).T


def _filled(values: Sequence[float | None]) -> list[float]:
    there = [value for value in values if value is not None]
    middle = math.fsum(there) / len(there) if there else 0.0
    return [middle if value is None else value for value in values]


def _log_odds(probability: float) -> float:
    bounded = min(max(probability, 1e-6), 1.0 - 1e-6)
    return math.log(bounded / (1.0 - bounded))
