"""Advantages: what each attempt was worth, compared with its siblings or its batch. Plain arithmetic on rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import fsum, sqrt

DEVIATION_FLOOR = 1e-6
"""Added to a standard deviation that divides, as GRPO does, so that a tiny one does not explode."""


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


def no_baseline(rewards_N: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i: REINFORCE (Williams 1992). Unbiased, of high variance; with rewards of 0 and 1 nothing is pushed down.

    No rewards give nothing.
    """
    return tuple(rewards_N)


def _equal(rewards: Sequence[float]) -> bool:
    return all(reward == rewards[0] for reward in rewards)


Advantage = Callable[[Sequence[float]], tuple[float, ...]]

ADVANTAGES: Mapping[str, Advantage] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "global_mean": group_mean,
    "global_mean_std": group_mean_std,
    "none": no_baseline,
}
"""`algorithm.advantage` -> the function. Those named global get the rewards of the whole batch (REINFORCE++, arXiv
2501.03262) instead of one group's. `gae` is none of them: see `gae`."""


def discounted_returns(reward: float, turns: int, discount: float) -> tuple[float, ...]:
    """What each of the turns is worth when the reward comes after the last: discount^(turns after it) x reward.

    No turns give nothing.
    """
    return tuple(reward * discount ** (turns - 1 - turn) for turn in range(turns))


def gae(
    values_T: Sequence[float], reward: float, *, discount: float, lam: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Generalised advantage estimation with one reward after the last action (arXiv 1506.02438).

    delta_t = r_t + discount V_{t+1} - V_t, with r_t = 0 but for the last and V = 0 after it;
    A_t = sum over k of (discount lam)^k delta_{t+k}. With lam = 1 it is the discounted return minus the value, with
    lam = 0 it is delta. An action is a token or a turn, as the caller likes.

    Args:
        values_T: the value of the state before each action.
        reward: after the last one.

    Returns:
        The advantages, and the targets of the values: advantage plus value. No actions give nothing.
    """
    advantages = [0.0] * len(values_T)
    ahead, following = 0.0, 0.0
    for t in reversed(range(len(values_T))):
        reached = reward if t == len(values_T) - 1 else discount * following
        ahead = reached - values_T[t] + discount * lam * ahead
        advantages[t], following = ahead, values_T[t]
    targets = tuple(advantage + value for advantage, value in zip(advantages, values_T, strict=True))
    return tuple(advantages), targets


def gae_of_sequence(
    values_T: Sequence[float], turns_T: Sequence[int], reward: float, *, by_turn: bool, discount: float, lam: float
) -> tuple[list[float], list[float], list[bool]]:
    """`gae` over the trained tokens of one sequence, where an action is a token or a whole turn.

    A turn's value is that of the state before its first token, and all its tokens share its advantage.

    Args:
        values_T: the value of the state before each trained token.
        turns_T: the turn of each.
        reward: of the trajectory.
        by_turn: whether a turn is one action.
        discount, lam: as of `gae`, for each action.

    Returns:
        For each token its advantage, the target of its value, and whether an action begins there.
    """
    begins = [not by_turn or index == 0 or turn != turns_T[index - 1] for index, turn in enumerate(turns_T)]
    advantages, targets = gae(
        [value for value, begin in zip(values_T, begins, strict=True) if begin], reward, discount=discount, lam=lam
    )
    action_of = [count - 1 for count in accumulate(begins)]
    return [advantages[action] for action in action_of], [targets[action] for action in action_of], begins


def whitened(advantages_N: Sequence[float]) -> tuple[float, ...]:
    """(A - mean) / (standard deviation + 1e-6), the deviation with N-1. Equal ones, or a single one, give zeros."""
    return group_mean_std(advantages_N) if advantages_N else ()
