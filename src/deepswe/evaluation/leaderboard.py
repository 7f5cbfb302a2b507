"""Results of many side by side, each with its interval: the rows of a table and of its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepswe.errors import ConfigError
from deepswe.evaluation.metrics import mean_pass_at_k, pass_at_1
from deepswe.evaluation.results import Budget, Results


@dataclass(frozen=True, slots=True)
class Entry:
    """One row.

    Attributes:
        name: of whose results.
        mean, low, high: pass@1 with its interval over tasks, tasks without a name included.
        tasks, attempts: with a verdict.
        pass_at_k, k: over the most attempts that each task has; None with one attempt.
        budget: of one attempt.
        size: parameters of the model in billions; None if unknown.
    """

    name: str
    mean: float
    low: float
    high: float
    tasks: int
    attempts: int
    pass_at_k: float | None
    k: int
    budget: Budget
    size: float | None = None

    def row(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def entry(results: Results, *, size: float | None = None) -> Entry:
    """One row.

    Raises:
        ConfigError: none of its tasks has a verdict.
    """
    outcomes = {**results.outcomes, **{f"\0{number}": (0.0,) for number in range(results.unlisted)}}
    if not any(outcomes.values()):
        raise ConfigError(f"{results.name} has no verdict; there is nothing to rank")
    estimate = pass_at_1(outcomes)
    k = min(len(scores) for scores in outcomes.values() if scores)
    return Entry(
        results.name,
        estimate.mean,
        estimate.low,
        estimate.high,
        estimate.tasks,
        estimate.attempts,
        mean_pass_at_k(outcomes, k) if k > 1 else None,
        k,
        results.budget,
        size,
    )


def leaderboard(results: Sequence[Results], sizes: dict[str, float] | None = None) -> tuple[Entry, ...]:
    """The rows, best first.

    Args:
        results: whose.
        sizes: name -> parameters of its model, in billions.

    Raises:
        ConfigError: two have one name, a size is of nobody, or one has no verdict.
    """
    names = [one.name for one in results]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two results have the name {min(twice)!r}; give one another by NAME=...")
    if unknown := set(sizes or {}) - set(names):
        raise ConfigError(f"--size names {min(unknown)!r}; the results are named {', '.join(names)}")
    rows = [entry(one, size=(sizes or {}).get(one.name)) for one in results]
    return tuple(sorted(rows, key=lambda row: (-row.mean, row.name)))
