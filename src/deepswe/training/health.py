"""Whether the numbers of a run are in their healthy ranges: a pure function of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from deepswe.config import AlgorithmConfig, ClusterConfig, TrainingConfig

Row = Mapping[str, Any]

ENTROPY_BAND = (0.3, 1.0)
"""Nats a token: where the DeepSWE write-up saw the base model's token entropy and needed no entropy bonus."""
WINDOW = 5
"""Steps that a mean of the reward is taken over."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A number that has left its healthy range.

    Attributes:
        name: short, the same for the same kind of trouble.
        text: what it is, and what may be done.
    """

    name: str
    text: str


def findings(rows: Sequence[Row]) -> tuple[Finding, ...]:
    """What is unhealthy about the last of a run's train rows, seen with those before it; nothing for no rows.

    Ranges: entropy 0.3 to 1 nat (the band of the DeepSWE write-up; small models from scratch may live outside of it),
    KL to the sampler up to 0.1 nat, at most 30% of the tokens clipped, no ratio above 10, a gradient norm up to ten
    times its recent median, at most half of the attempts cut off by the context, at most a tenth without a verdict,
    and at least a tenth of the groups with a gradient. The reward has collapsed where its mean over 5 steps is below
    half of the best such mean so far (which must have been above 0.1).
    """
    return tuple(found for check in _CHECKS if rows and (found := check(rows)) is not None)


def clip_warning(training: TrainingConfig, algorithm: AlgorithmConfig) -> str:
    """Why the clip cannot act, or "" where it can.

    With one update a batch on fresh samples the ratio is 1 for every token, so no bound is ever reached: clip higher,
    or any clipping, has no effect at all.
    """
    if algorithm.ratio == "none":
        return "algorithm.ratio is none, so there is nothing to clip: clip_low and clip_high have no effect"
    if training.updates_per_step * training.epochs == 1:
        return (
            "one update a batch on fresh samples: the ratio is 1, so clip_low and clip_high have no effect; "
            "training.updates_per_step or training.epochs above 1 let the clip act"
        )
    return ""


def device_warning(cluster: ClusterConfig, *, seen: bool) -> str:
    """That a recipe for a GPU runs without one, or "" where it does not. `seen`: torch sees one."""
    if cluster.gpu == "cpu" or seen:
        return ""
    return f"no GPU is seen, but cluster.gpu is {cluster.gpu}: everything in this process runs on the CPU"


def _entropy(rows: Sequence[Row]) -> Finding | None:
    low, high = ENTROPY_BAND
    value = rows[-1].get("entropy", low)
    if not rows[-1].get("updates", 1) or low <= value <= high:
        return None
    if value < low:
        # The clip acts from the second update of a batch on.
        clip = ", algorithm.clip_high" if rows[-1].get("updates", 1) > 1 else ""
        ways = f"a higher rollout.temperature{clip} or algorithm.entropy_coefficient keeps it up"
        return Finding("entropy_low", f"entropy {value:.2f} is below {low}: the policy explores little; {ways}")
    return Finding("entropy_high", f"entropy {value:.2f} is above {high}: much of what is sampled is noise")


def _above(key: str, limit: float, name: str, text: str) -> Callable[[Sequence[Row]], Finding | None]:
    def check(rows: Sequence[Row]) -> Finding | None:
        value = rows[-1].get(key, 0.0)
        return Finding(name, text.format(value=value, limit=limit)) if value > limit else None

    return check


def _clipped(rows: Sequence[Row]) -> Finding | None:
    share = rows[-1].get("clip_low", 0.0) + rows[-1].get("clip_high", 0.0)
    if share <= 0.3:
        return None
    return Finding("clipped", f"{share:.0%} of the tokens are clipped: fewer updates a batch or a lower learning rate")


def _gradient(rows: Sequence[Row]) -> Finding | None:
    before = [row["grad_norm"] for row in rows[-21:-1] if row.get("grad_norm", 0.0) > 0]
    value = rows[-1].get("grad_norm", 0.0)
    if len(before) < 5 or value <= 10 * median(before):
        return None
    return Finding(
        "gradient", f"gradient norm {value:.3g} is more than ten times its recent median {median(before):.3g}"
    )


def _truncated(rows: Sequence[Row]) -> Finding | None:
    cut, whole = rows[-1].get("ending/max_context", 0), _attempts(rows[-1])
    if not whole or cut / whole <= 0.5:
        return None
    return Finding("truncated", f"{cut / whole:.0%} of the attempts ran out of context: raise rollout.max_tokens")


def _ungraded(rows: Sequence[Row]) -> Finding | None:
    whole = _attempts(rows[-1])
    lost = whole - rows[-1].get("graded", whole)
    if not whole or lost / whole <= 0.1:
        return None
    return Finding("ungraded", f"{lost / whole:.0%} of the attempts have no verdict: look at their errors")


def _uninformative(rows: Sequence[Row]) -> Finding | None:
    groups, some = rows[-1].get("groups", 0), rows[-1].get("groups_informative", 0)
    if not groups or some / groups >= 0.1:
        return None
    return Finding(
        "uninformative",
        f"{some:.0f} of {groups:.0f} groups have a gradient: the tasks are too hard or too easy; "
        "algorithm.resample_batches looks for others",
    )


def _collapse(rows: Sequence[Row]) -> Finding | None:
    rewards = [row.get("reward_mean", 0.0) for row in rows]
    if len(rewards) < 2 * WINDOW:
        return None
    means = [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    if max(means) <= 0.1 or means[-1] >= 0.5 * max(means):
        return None
    return Finding(
        "collapse", f"the reward has collapsed: {means[-1]:.2f} over {WINDOW} steps, {max(means):.2f} at best"
    )


def _attempts(row: Row) -> float:
    return float(sum(value for key, value in row.items() if key.startswith("ending/")))


_CHECKS: tuple[Callable[[Sequence[Row]], Finding | None], ...] = (
    _collapse,
    _entropy,
    _above(
        "kl_sampler", 0.1, "kl_sampler", "KL to the sampler {value:.2f} is above {limit}: engine and learner disagree"
    ),
    _above("ratio_max", 10.0, "ratio", "the largest ratio is {value:.3g}: samples are far from the policy"),
    _clipped,
    _gradient,
    _truncated,
    _ungraded,
    _uninformative,
)
