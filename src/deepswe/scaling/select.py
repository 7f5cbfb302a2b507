"""Which of several candidates to submit. Pure functions over scores; none of them sees an outcome.

A selector takes the candidates of one task and returns those that it holds for the best: one, or several that it
cannot tell apart. What that choice is worth is the mean over them, so the order of the candidates never matters.
A score that is missing counts below every score that is there; where all are missing, all are equally good.

Source: original.md section 5 (DeepSWE's hybrid scaling, R2E-Gym's verifiers); CodeT (Chen et al. 2022) for agreement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from deepswe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Scores:
    """What is known of one candidate without knowing whether it is right.

    Attributes:
        candidate: its name, unique in its task.
        patch: key of its normalised patch; candidates with equal patches are the same work.
        verifier: probability, by the execution-free verifier, that it is right.
        regression: share of the repository's own tests, of those that pass before the change, that pass after it.
        reproduction: generated test -> whether it passes.
    """

    candidate: str
    patch: str
    verifier: float | None = None
    regression: float | None = None
    reproduction: Mapping[str, bool] | None = None

    @property
    def reproduced(self) -> float | None:
        """Number of generated tests that pass, or None if none was run."""
        return None if self.reproduction is None else float(sum(self.reproduction.values()))


Selector = Callable[[Sequence[Scores]], tuple[Scores, ...]]


def share_equal(candidates: Sequence[Scores]) -> tuple[Scores, ...]:
    """Give candidates with the same patch the same scores: means of those that are there.

    Test results of one patch can differ only by flaky tests; a generated test then passes if it did in most runs.
    The order of the candidates is kept.
    """
    groups: dict[str, list[Scores]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.patch, []).append(candidate)
    shared = {patch: _merge(group) for patch, group in groups.items()}
    return tuple(
        replace(shared[candidate.patch], candidate=candidate.candidate)
        if len(groups[candidate.patch]) > 1
        else candidate
        for candidate in candidates
    )


def _merge(group: Sequence[Scores]) -> Scores:
    runs = [candidate.reproduction for candidate in group if candidate.reproduction is not None]
    votes: dict[str, list[bool]] = {}
    for run in runs:
        for test, passed in run.items():
            votes.setdefault(test, []).append(passed)
    return Scores(
        group[0].candidate,
        group[0].patch,
        _mean(candidate.verifier for candidate in group),
        _mean(candidate.regression for candidate in group),
        {test: 2 * sum(passed) > len(passed) for test, passed in votes.items()} if runs else None,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    there = sorted(value for value in values if value is not None)
    return fmean(there) if there else None


def by_verifier(candidates: Sequence[Scores]) -> tuple[Scores, ...]:
    """Execution-free: the highest probability of the verifier."""
    return _best(candidates, lambda c: (_or_lowest(c.verifier),))


def by_execution(candidates: Sequence[Scores]) -> tuple[Scores, ...]:
    """Execution-based: the most regression tests, among these the most generated tests."""
    return _best(candidates, lambda c: (_or_lowest(c.regression), _or_lowest(c.reproduced)))


def hybrid(candidates: Sequence[Scores]) -> tuple[Scores, ...]:
    """DeepSWE's: of the half with the highest probabilities, the best by execution, then by probability.

    Half is rounded up, and all that tie at its edge belong to it. One candidate is its own half.
    """
    ranked = sorted((_or_lowest(c.verifier) for c in candidates), reverse=True)
    edge = ranked[(len(ranked) + 1) // 2 - 1]
    half = [c for c in candidates if _or_lowest(c.verifier) >= edge]
    return _best(half, lambda c: (_or_lowest(c.regression), _or_lowest(c.reproduced), _or_lowest(c.verifier)))


def by_majority(candidates: Sequence[Scores]) -> tuple[Scores, ...]:
    """The patch that most candidates agree on."""
    votes = Counter(c.patch for c in candidates)
    return _best(candidates, lambda c: (votes[c.patch],))


def by_agreement(candidates: Sequence[Scores]) -> tuple[Scores, ...]:
    """CodeT: candidates that pass the same generated tests stand for one behaviour; the best has the most support.

    Support is the number of different patches of that behaviour times the number of tests that they pass, among the
    candidates with the best regression score. Candidates without generated tests are one behaviour that passes none.
    """
    sound = _best(candidates, lambda c: (_or_lowest(c.regression),))
    behaviours: dict[frozenset[str], set[str]] = {}
    for c in sound:
        behaviours.setdefault(_passes(c), set()).add(c.patch)
    return _best(sound, lambda c: (len(behaviours[_passes(c)]) * len(_passes(c)), len(behaviours[_passes(c)])))


def _passes(candidate: Scores) -> frozenset[str]:
    return frozenset(test for test, passed in (candidate.reproduction or {}).items() if passed)


UNSCORED = ("majority",)
"""Methods that look at no score."""

SELECTORS: Mapping[str, Selector] = {
    "verifier": by_verifier,
    "execution": by_execution,
    "hybrid": hybrid,
    "majority": by_majority,
    "agreement": by_agreement,
}
"""The selectors that need no fitting, by name."""


def select(method: str, candidates: Sequence[Scores]) -> tuple[Scores, ...]:
    """The best of a task's candidates by a named method; candidates with equal patches share their scores first.

    Raises:
        ConfigError: there is no such method, no candidate, or a name twice.
    """
    if method not in SELECTORS:
        raise ConfigError(f"there is no selection method {method!r}; the methods are {', '.join(SELECTORS)}")
    names = Counter(c.candidate for c in candidates)
    if not names or names.most_common(1)[0][1] > 1:
        raise ConfigError(
            f"candidates must have one name each, and there must be one at least; got {dict(names.most_common(3))}"
        )
    return SELECTORS[method](share_equal(candidates))


def _best(candidates: Sequence[Scores], key: Callable[[Scores], tuple[float, ...]]) -> tuple[Scores, ...]:
    keys = [key(candidate) for candidate in candidates]
    top = max(keys)
    return tuple(candidate for candidate, value in zip(candidates, keys, strict=True) if value == top)


def _or_lowest(score: float | None) -> float:
    return -math.inf if score is None or math.isnan(score) else score
