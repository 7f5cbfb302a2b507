"""How hard tasks are for a policy, by the share of its attempts that solved them; and which to train on, and how often.

The choice of a step is a pure function of the weights, the step and the seed, so that a run that goes on after a kill
takes the same tasks as one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from deepswe.errors import TaskError
from deepswe.tasks.task import Measured, TaskSet

Scheme = Literal["uniform", "band", "inverse", "uncertain"]
Rates = Mapping[str, tuple[int, int]]
"""Task id -> (attempts, solved)."""

BANDS: Mapping[str, tuple[float, float]] = {
    "solve none": (0.0, 0.0),
    "hard": (0.0, 0.25),
    "medium": (0.25, 0.75),
    "easy": (0.75, 1.0),
    "solve all": (1.0, 1.0),
}
"""Band -> (above, up to), both rates; the first and the last are these rates alone."""
UNRATED = "unrated"
FLOOR = 0.05
"""Least weight of a task under `inverse` and `uncertain`: nothing is given up for good."""
_UNRATED_RATE = 0.5
"""What a task without attempts is taken for."""


def band_of(measured: Measured) -> str:
    """The name of a task's band."""
    rate = measured.pass_rate
    if rate is None:
        return UNRATED
    if rate in (0.0, 1.0):
        return "solve all" if rate else "solve none"
    return next(name for name, (low, high) in BANDS.items() if low < rate <= high)


def count_attempts(outcomes: Iterable[tuple[str, float | None]]) -> dict[str, tuple[int, int]]:
    """Attempts and solved ones by task, out of (task id, reward); an attempt without a verdict does not count."""
    rates: dict[str, tuple[int, int]] = {}
    for task, reward in outcomes:
        if reward is not None:
            attempts, solved = rates.get(task, (0, 0))
            rates[task] = (attempts + 1, solved + (reward >= 1.0))
    return rates


def with_rates(tasks: TaskSet, rates: Rates, *, add: bool = False) -> TaskSet:
    """The set with attempts and solved ones.

    Args:
        tasks: the set; a rate of a task that it does not have is left out.
        rates: new counts.
        add: to the counts that are there, instead of in their place.
    """
    measured = dict(tasks.measured)
    for task in tasks.tasks:
        if task.id in rates:
            old = measured.get(task.id, Measured())
            before = (old.attempts, old.solved) if add else (0, 0)
            attempts, solved = rates[task.id]
            measured[task.id] = replace(old, attempts=before[0] + attempts, solved=before[1] + solved)
    return TaskSet(tasks.tasks, tasks.hidden, measured)


def describe_rates(tasks: TaskSet) -> dict[str, object]:
    """What the command prints.

    Returns:
        tasks, rated, attempts; bands (band -> tasks); solve_none and solve_all, the ids of those.
    """
    rows = {task.id: tasks.measured.get(task.id, Measured()) for task in tasks.tasks}
    bands = {name: [ident for ident, row in rows.items() if band_of(row) == name] for name in (*BANDS, UNRATED)}
    return {
        "tasks": len(rows),
        "rated": sum(bool(row.attempts) for row in rows.values()),
        "attempts": sum(row.attempts for row in rows.values()),
        "bands": {name: len(ids) for name, ids in bands.items()},
        "solve_none": bands["solve none"],
        "solve_all": bands["solve all"],
    }


def weights(
    tasks: TaskSet, scheme: Scheme, *, low: float = 0.0, high: float = 1.0, unrated: bool = True
) -> tuple[float, ...]:
    """How often each task of a set is to be drawn, relative to the others; 0 leaves it out.

    Args:
        tasks: the set.
        scheme: `uniform` treats all alike; `band` does so with those whose pass rate is from `low` to `high`; `inverse`
            draws by the share of failures, hard ones more often; `uncertain` by the spread p (1 - p), in which groups
            with both outcomes are the most likely.
        low, high: bounds of every scheme, included.
        unrated: whether tasks without attempts are drawn; as if half of their attempts had solved them.
    """
    return tuple(_weight(tasks.measured.get(task.id, Measured()), scheme, low, high, unrated) for task in tasks.tasks)


def _weight(row: Measured, scheme: Scheme, low: float, high: float, unrated: bool) -> float:
    rate = row.pass_rate
    if rate is None:
        if not unrated:
            return 0.0
        rate = _UNRATED_RATE
    elif not low <= rate <= high:
        return 0.0
    if scheme == "inverse":
        return max(FLOOR, 1.0 - rate)
    return max(FLOOR, 4.0 * rate * (1.0 - rate)) if scheme == "uncertain" else 1.0


def draw(weights: Sequence[float], *, count: int, step: int, seed: int) -> tuple[int, ...]:
    """The tasks of one step, as places in the set: without repetition, a pure function of the arguments.

    Each place gets the key u^(1/w) with u uniform, and the largest keys win (Efraimidis and Spirakis 2006), so that the
    first place drawn has exactly the probabilities that the weights say.

    Args:
        weights: not negative; 0 is never drawn.
        count: places to draw.
        step, seed: which draw.

    Raises:
        TaskError: fewer than `count` weights are above 0.
    """
    able = [place for place, weight in enumerate(weights) if weight > 0]
    if len(able) < count:
        raise TaskError(f"{count} tasks a step are wanted, but the sampler leaves only {len(able)} of {len(weights)}")
    digest = hashlib.blake2b(f"{seed}\x1fsampler\x1f{step}".encode(), digest_size=8).digest()
    rng = random.Random(int.from_bytes(digest, "big"))
    keys = {place: math.log(1.0 - rng.random()) / weights[place] for place in able}
    return tuple(sorted(able, key=lambda place: (-keys[place], place))[:count])


def split_by_repository(tasks: TaskSet, shares: Mapping[str, float], *, seed: int = 0) -> TaskSet:
    """Deal whole repositories out to splits, so that no repository is in two.

    The repositories are taken in a random order, the large ones first, and each goes to the split that lacks most.

    Args:
        tasks: the set.
        shares: split -> wanted share of the tasks; what is missing to 1 goes to "train".
        seed: of the order.

    Raises:
        TaskError: the shares are no shares, or there are fewer repositories than splits.
    """
    wanted = dict(shares)
    rest = 1.0 - math.fsum(wanted.values())
    if any(not 0.0 < share < 1.0 for share in wanted.values()) or rest < -1e-9:
        raise TaskError(f"shares {wanted} are not between 0 and 1 with a sum of at most 1")
    if rest > 1e-9:
        wanted["train"] = wanted.get("train", 0.0) + rest
    sizes: dict[str, int] = {}
    for task in tasks.tasks:
        sizes[task.repo] = sizes.get(task.repo, 0) + 1
    if len(sizes) < len(wanted):
        raise TaskError(
            f"{len(sizes)} repositories cannot be dealt out to {len(wanted)} splits, each in one alone: leave the set "
            'undivided, with evaluation.splits=["train"] in its recipe, and hold out tasks of another project'
        )
    names = sorted(sizes)
    random.Random(seed).shuffle(names)
    names.sort(key=lambda name: -sizes[name])
    total, held, place = len(tasks.tasks), dict.fromkeys(wanted, 0), dict[str, str]()
    for number, name in enumerate(names):
        empty = [split for split in wanted if not held[split]]
        open_ = empty if len(empty) == len(names) - number else list(wanted)
        split = max(open_, key=lambda item: wanted[item] * total - held[item])
        place[name] = split
        held[split] += sizes[name]
    dealt = tuple(replace(task, split=place[task.repo]) for task in tasks.tasks)
    return TaskSet(dealt, tasks.hidden, tasks.measured)
