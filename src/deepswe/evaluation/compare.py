"""Two results against each other, paired by task: the difference, an exact test, and which tasks were won and lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from deepswe.errors import ConfigError
from deepswe.evaluation.metrics import Difference, paired_difference
from deepswe.evaluation.results import Results


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the second has over the first.

    Attributes:
        first, second: names.
        means: pass@1 of each over the shared tasks.
        difference: paired by task, with its interval; over all shared tasks, those without a name included.
        won, lost: tasks that the second, and the first, solves more often.
        both, either: tasks that both solve at least once, and that one of them does.
        p_value: exact and two-sided, that won and lost are equally likely: McNemar's test with one attempt a task.
        unequal: limits of the budgets that differ or are unknown.
    """

    first: str
    second: str
    means: tuple[float, float]
    difference: Difference
    won: tuple[str, ...]
    lost: tuple[str, ...]
    both: int
    either: int
    p_value: float
    unequal: dict[str, tuple[Any, Any]]


def compare(first: Results, second: Results, *, force: bool = False) -> Comparison:
    """Compare.

    Args:
        first, second: what to compare.
        force: also where the budgets are not known to be equal.

    Raises:
        ConfigError: their budgets differ or are unknown, and `force` is not given: a larger budget raises scores more
            than training does. Or they share no task.
    """
    unequal = first.budget.unequal(second.budget)
    if unequal and not force:
        said = ", ".join(f"{name} {_limit(a)} and {_limit(b)}" for name, (a, b) in unequal.items())
        raise ConfigError(
            f"{first.name} and {second.name} did not have the same budget for an attempt ({said}), which moves scores "
            "more than training does; evaluate both under one budget, or compare them all the same with --force"
        )
    left, right = first.complete(second.outcomes), second.complete(first.outcomes)
    before, after = dict(left.outcomes), dict(right.outcomes)
    for number in range(min(left.unlisted, right.unlisted)):
        before[f"\0{number}"] = after[f"\0{number}"] = (0.0,)  # solved by neither, of unknown name
    try:
        difference = paired_difference(before, after)
    except ValueError as error:
        raise ConfigError(f"{first.name} and {second.name} cannot be compared: {error}") from error
    shared = sorted(task for task in before if before[task] and after.get(task))
    pairs = [(task, fmean(before[task]), fmean(after[task])) for task in shared]
    won = tuple(task for task, a, b in pairs if b > a)
    lost = tuple(task for task, a, b in pairs if b < a)
    return Comparison(
        first=first.name,
        second=second.name,
        means=(fmean(a for _, a, _ in pairs), fmean(b for _, _, b in pairs)),
        difference=difference,
        won=won,
        lost=lost,
        both=sum(a > 0 and b > 0 for _, a, b in pairs),
        either=sum(a > 0 or b > 0 for _, a, b in pairs),
        p_value=exact_sign_test(len(won), len(lost)),
        unequal=unequal,
    )


def exact_sign_test(won: int, lost: int) -> float:
    """Two-sided p-value of `won` against `lost` under a fair coin; 1 where there is neither (McNemar 1947, exact).

    Raises:
        ValueError: one of them is negative.
    """
    if won < 0 or lost < 0:
        raise ValueError(f"exact_sign_test({won}, {lost}): counts are never negative")
    n, fewer = won + lost, min(won, lost)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**n))


def _limit(value: Any) -> str:
    return "unknown" if value is None else ("none" if not value else f"{value:g}")
