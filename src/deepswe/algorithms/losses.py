"""Losses over the trained tokens of a batch, and the denominators that make them independent of micro-batching."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss and its token statistics.

    Attributes:
        loss: scalar, to be added over the micro-batches of an update.
        clipped_low, clipped_high: tokens whose gradient the lower or the upper clip removed.
        ratio_sum: sum of the ratios; over the number of tokens, their mean.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    ratio_sum: Tensor


def clipped_policy_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    advantage_N: Tensor,
    denominator_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """- sum over tokens of min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) / denominator.

    PPO's surrogate (arXiv 1707.06347) with the two bounds apart ("clip higher", DAPO, arXiv 2503.14476) and no KL
    term. Because each token brings its own denominator, taken over the whole batch by `DENOMINATORS`, the sum over
    micro-batches equals the loss of the full batch. No tokens give 0.

    A token with A > 0 has no gradient when its ratio is above 1 + clip_high, one with A < 0 none when its ratio is
    below 1 - clip_low. With one update per batch and the learner's own old log-probs the ratio is exactly 1, and the
    bounds do nothing.

    Args:
        logp_N: log-probs of the trained tokens under the policy being trained; has the gradient.
        old_logp_N: under the policy that the ratio is taken to; no gradient.
        advantage_N: of each token's trajectory.
        denominator_N: of each token.
        clip_low, clip_high: distances of the bounds from 1.
    """
    ratio_N = (logp_N - old_logp_N).exp()
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate_N = (ratio_N * advantage_N).minimum(clipped_N * advantage_N)
    detached_N = ratio_N.detach()
    return PolicyLoss(
        loss=-(surrogate_N / denominator_N).sum(),
        clipped_low=((detached_N < 1.0 - clip_low) & (advantage_N < 0)).sum(),
        clipped_high=((detached_N > 1.0 + clip_high) & (advantage_N > 0)).sum(),
        ratio_sum=detached_N.sum(),
    )


def kl_estimate(logp_N: Tensor, sampler_logp_N: Tensor) -> Tensor:
    """Per-token estimate of KL(sampler || policy): r - 1 - log r with r = policy / sampler.

    Non-negative, unbiased and of low variance (Schulman, "Approximating KL divergence", k3). It measures both the
    distance that training has moved and the disagreement between the engine and the learner.
    """
    log_ratio_N = logp_N - sampler_logp_N
    return log_ratio_N.exp() - 1.0 - log_ratio_N


def constant_denominators(trained_B: Sequence[int], *, trajectories: int, length: int) -> list[float]:
    """`trajectories` x `length` for each: no length bias (Dr. GRPO, arXiv 2503.20783).

    Args:
        trained_B: trained tokens of each sample.
        trajectories: of the batch as it was sampled, before any filter; so filtering scales nothing.
        length: the constant, usually the longest allowed trajectory.
    """
    return [float(trajectories * length)] * len(trained_B)


def token_mean_denominators(trained_B: Sequence[int], *, trajectories: int, length: int) -> list[float]:
    """All trained tokens of the batch, for each: every token weighs the same (DAPO). The other arguments are unused."""
    return [float(sum(trained_B))] * len(trained_B)


def sequence_mean_denominators(trained_B: Sequence[int], *, trajectories: int, length: int) -> list[float]:
    """Own trained tokens x number of samples: every sample weighs the same (GRPO). The other arguments are unused."""
    return [float(trained * len(trained_B)) for trained in trained_B]


DENOMINATORS: Mapping[str, Callable[..., list[float]]] = {
    "constant": constant_denominators,
    "token_mean": token_mean_denominators,
    "sequence_mean": sequence_mean_denominators,
}
"""`algorithm.normalisation` -> the function from trained tokens per sample, over the whole batch, to denominators."""
