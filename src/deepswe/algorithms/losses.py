"""Losses over the trained tokens of a batch, and the denominators that make them independent of micro-batching.

Every term is a sum over tokens of something over that token's own denominator, which is taken over the whole batch; so
the sum over micro-batches is the loss of the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_LIMIT = 20.0
"""Logarithms of ratios are held within this, so that no exponential overflows; e^20 is beyond any use."""

Level = Literal["token", "sequence_mean", "sequence"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss and its token statistics.

    Attributes:
        loss: scalar, to be added over the micro-batches of an update.
        clipped_low, clipped_high: tokens whose gradient the lower or the upper clip removed.
        ratio_sum: sum of the ratios; over the number of tokens, their mean.
        ratio_max: the largest ratio; 0 without tokens.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor


def clipped_policy_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    denominator_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    row_N: Tensor | None = None,
    level: Level = "token",
    weight_N: Tensor | None = None,
) -> PolicyLoss:
    """- sum over tokens of w min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) / denominator.

    PPO's surrogate (arXiv 1707.06347) with the two bounds apart ("clip higher", DAPO, arXiv 2503.14476). No tokens
    give 0.

    A token with A > 0 has no gradient when its ratio is above 1 + clip_high, one with A < 0 none when its ratio is
    below 1 - clip_low. With one update per batch and the learner's own old log-probs the ratio is exactly 1, and the
    bounds do nothing.

    Args:
        logp_N: log-probs of the trained tokens under the policy being trained; has the gradient.
        old_logp_N: under the policy that the ratio is taken to; no gradient.
        advantage_N: of each token.
        denominator_N: of each token.
        clip_low, clip_high: distances of the bounds from 1.
        row_N: the sequence of each token; needed at the levels of a sequence.
        level: "token"; "sequence_mean": every token has the geometric mean of its sequence's ratios (GSPO, arXiv
            2507.18071); "sequence": their product (RLOO as in arXiv 2402.14740, section 3).
        weight_N: importance weights without gradient; None is 1 everywhere.
    """
    log_ratio_N = (logp_N - old_logp_N).clamp(-LOG_LIMIT, LOG_LIMIT)
    if level != "token":
        if row_N is None:
            raise ValueError(f"the ratio of level {level!r} needs row_N, the sequence of each token")
        log_ratio_N = sum_by_row(log_ratio_N, row_N, mean=level == "sequence_mean").clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate_N = (ratio_N * advantage_N).minimum(clipped_N * advantage_N)
    if weight_N is not None:
        surrogate_N = surrogate_N * weight_N
    detached_N = ratio_N.detach()
    return PolicyLoss(
        loss=-(surrogate_N / denominator_N).sum(),
        clipped_low=((detached_N < 1.0 - clip_low) & (advantage_N < 0)).sum(),
        clipped_high=((detached_N > 1.0 + clip_high) & (advantage_N > 0)).sum(),
        ratio_sum=detached_N.sum(),
        ratio_max=detached_N.max() if len(detached_N) else detached_N.sum(),
    )


def reinforce_loss(
    logp_N: Tensor, advantage_N: Tensor, denominator_N: Tensor, *, weight_N: Tensor | None = None
) -> PolicyLoss:
    """- sum over tokens of w A log p / denominator: the policy gradient without a ratio, so without a bound.

    Args: as of `clipped_policy_loss`. Its gradient on fresh samples equals that of the surrogate; after an update of
    the same batch it does not know that the policy has moved.
    """
    gained_N = advantage_N * logp_N if weight_N is None else weight_N * advantage_N * logp_N
    nothing = torch.zeros((), device=logp_N.device)
    ones = torch.tensor(float(len(logp_N)), device=logp_N.device)
    return PolicyLoss(-(gained_N / denominator_N).sum(), nothing, nothing, ones, ones.clamp(max=1.0))


def importance_weights(
    old_logp_N: Tensor, sampler_logp_N: Tensor, row_N: Tensor, *, kind: str, cap: float, floor: float = 0.0
) -> Tensor | None:
    """Weights learner / sampler before the update, for samples of an engine that disagrees with the learner.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training") and its masked form (IcePop). At the level of a sequence the weight is the product over its trained
    tokens.

    Args:
        old_logp_N: the learner's log-probs before the update; no gradient.
        sampler_logp_N: the engine's.
        row_N: the sequence of each token.
        kind: "none", "token_truncated", "token_masked", "sequence_truncated" or "sequence_masked".
        cap, floor: truncated weights are held between these; masked ones are 0 outside.

    Returns:
        weight_N, or None for "none".

    Raises:
        ValueError: no such kind.
    """
    if kind == "none":
        return None
    level, _, form = kind.partition("_")
    if level not in ("token", "sequence") or form not in ("truncated", "masked"):
        raise ValueError(f"there are no importance weights of kind {kind!r}")
    log_N = old_logp_N - sampler_logp_N
    if level == "sequence":
        log_N = sum_by_row(log_N, row_N)
    weight_N = log_N.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if form == "truncated":
        return weight_N.clamp(floor, cap)
    return weight_N.masked_fill((weight_N < floor) | (weight_N > cap), 0.0)


def kl_estimate(logp_N: Tensor, sampler_logp_N: Tensor) -> Tensor:
    """Per-token estimate of KL(sampler || policy): r - 1 - log r with r = policy / sampler.

    Non-negative, unbiased and of low variance (Schulman, "Approximating KL divergence", k3). It measures both the
    distance that training has moved and the disagreement between the engine and the learner.
    """
    log_ratio_N = logp_N - sampler_logp_N
    return log_ratio_N.exp() - 1.0 - log_ratio_N


def kl_penalty(logp_N: Tensor, reference_logp_N: Tensor, *, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy (Schulman, as of `kl_estimate`).

    With d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a loss, k2 has the gradient of
    the divergence on fresh samples; the gradient of k1 is 0 in expectation (it only adds variance), and that of k3 is
    the gradient of the reverse divergence. GRPO adds k3.

    Raises:
        ValueError: no such estimator.
    """
    log_ratio_N = (logp_N - reference_logp_N).clamp(-LOG_LIMIT, LOG_LIMIT)
    if kind == "k1":
        return log_ratio_N
    if kind == "k2":
        return 0.5 * log_ratio_N**2
    if kind == "k3":
        return (-log_ratio_N).exp() - 1.0 + log_ratio_N
    raise ValueError(f"there is no estimator {kind!r}; use k1, k2 or k3")


def value_loss(value_N: Tensor, target_N: Tensor, action_N: Tensor) -> Tensor:
    """Half the squared error of the values, meaned over the actions by their weights: sum of w (v - target)^2 / 2.

    Args:
        value_N: of the state before each trained token; has the gradient.
        target_N: what it should have been; no gradient.
        action_N: weight of each token: 1 / (actions of the whole mini-batch) where an action begins, 0 elsewhere.
    """
    return (0.5 * (value_N - target_N) ** 2 * action_N).sum()


def sum_by_row(values_N: Tensor, row_N: Tensor, *, mean: bool = False) -> Tensor:
    """For each token the sum, or the mean, over the tokens of its sequence; differentiable."""
    if not len(values_N):
        return values_N
    rows = int(row_N.max()) + 1
    sums_B = values_N.new_zeros(rows).index_add(0, row_N, values_N)
    if mean:
        sums_B = sums_B / torch.bincount(row_N, minlength=rows).clamp(min=1)
    return sums_B[row_N]


def constant_denominators(trained_B: Sequence[int], *, trajectories: int, length: int) -> list[float]:
    """`trajectories` x `length` for each: no length bias (Dr. GRPO, arXiv 2503.20783).

    Args:
        trained_B: trained tokens of each trajectory.
        trajectories: of the batch as it was sampled, before any filter; so filtering scales nothing.
        length: the constant, usually the longest allowed trajectory.
    """
    return [float(trajectories * length)] * len(trained_B)


def token_mean_denominators(trained_B: Sequence[int], *, trajectories: int, length: int) -> list[float]:
    """All trained tokens of the batch, for each: every token weighs the same (DAPO). The other arguments are unused."""
    return [float(sum(trained_B))] * len(trained_B)


def sequence_mean_denominators(trained_B: Sequence[int], *, trajectories: int, length: int) -> list[float]:
    """Own trained tokens x number of trajectories: every one weighs the same (GRPO). The other arguments are unused."""
    return [float(trained * len(trained_B)) for trained in trained_B]


DENOMINATORS: Mapping[str, Callable[..., list[float]]] = {
    "constant": constant_denominators,
    "token_mean": token_mean_denominators,
    "sequence_mean": sequence_mean_denominators,
}
"""`algorithm.normalisation` -> the function from trained tokens per trajectory, over the whole batch, to
denominators."""
