"""Advantages: what each attempt of a group was worth, compared with its siblings. Plain arithmetic on rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum, sqrt

DEVIATION_FLOOR = 1e-6
"""Added to the standard deviation in `group_mean_std`, as GRPO does, so that a tiny one does not explode."""


def leave_one_out(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean of the others: an unbiased baseline (RLOO, arXiv 2402.14740; LOOP, arXiv 2502.01600).

    Equal rewards give zeros. It is G/(G-1) times `group_mean`.

    Args:
        rewards_G: the rewards of one group.

    Raises:
        ValueError: fewer than two rewards; there is nothing to leave in.
    """
    if len(rewards_G) < 2:
        raise ValueError(f"leave_one_out got {len(rewards_G)} rewards; it needs at least 2")
    if _equal(rewards_G):
        return (0.0,) * len(rewards_G)
    total = fsum(rewards_G)
    return tuple(reward - (total - reward) / (len(rewards_G) - 1) for reward in rewards_G)


def group_mean(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean of the group, itself included (Dr. GRPO, arXiv 2503.20783).

    Equal rewards, so also a single one, give zeros.

    Raises:
        ValueError: no rewards.
    """
    if not rewards_G:
        raise ValueError("group_mean got no rewards; it needs at least 1")
    if _equal(rewards_G):
        return (0.0,) * len(rewards_G)
    mean = fsum(rewards_G) / len(rewards_G)
    return tuple(reward - mean for reward in rewards_G)


def group_mean_std(rewards_G: Sequence[float]) -> tuple[float, ...]:
    """A_i = (r_i - mean) / (standard deviation + 1e-6), the deviation with G-1 (GRPO, arXiv 2402.03300).

    Equal rewards, so also a single one, give zeros. It weighs very easy and very hard tasks up.

    Raises:
        ValueError: no rewards.
    """
    centred = group_mean(rewards_G)
    if not any(centred):
        return centred
    deviation = sqrt(fsum(value * value for value in centred) / (len(centred) - 1))
    return tuple(value / (deviation + DEVIATION_FLOOR) for value in centred)


def _equal(rewards: Sequence[float]) -> bool:
    return all(reward == rewards[0] for reward in rewards)


Advantage = Callable[[Sequence[float]], tuple[float, ...]]

ADVANTAGES: Mapping[str, Advantage] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
}
"""`algorithm.advantage` -> the function."""
