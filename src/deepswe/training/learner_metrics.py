"""What an update says about itself: sums over tokens, and the columns that come of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepswe.algorithms.filters import Selection, age
from deepswe.training.learner_batch import MiniBatch


@dataclass
class Sums:
    """Token statistics of one `update`, added over micro-batches and mini-batches.

    Attributes:
        values: by name.
        greatest: the names whose value is the largest, not the sum.
    """

    values: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    greatest: set[str] = field(default_factory=set)

    def add(self, **amounts: float) -> None:
        """Add to the sums of these names."""
        for name, amount in amounts.items():
            self.values[name] += amount

    def raise_to(self, **amounts: float) -> None:
        """Keep the largest of these names."""
        self.greatest |= amounts.keys()
        for name, amount in amounts.items():
            self.values[name] = max(self.values[name], amount)

    def mean(self, name: str, over: str) -> float:
        """One sum over another; 0 where that is 0."""
        return self.values[name] / self.values[over] if self.values[over] else 0.0


def moments(value_N: Tensor, target_N: Tensor) -> dict[str, float]:
    """Sums for the explained variance of the values."""
    wide_N, error_N = target_N.double(), (target_N - value_N).double()
    return {
        "targets": float(wide_N.sum()),
        "targets_squared": float((wide_N**2).sum()),
        "errors": float(error_N.sum()),
        "errors_squared": float((error_N**2).sum()),
        "valued": float(len(target_N)),
    }


def explained(sums: Sums) -> float:
    """1 - Var(target - value) / Var(target); 0 where the targets are all equal."""
    spread = sums.mean("targets_squared", "valued") - sums.mean("targets", "valued") ** 2
    left = sums.mean("errors_squared", "valued") - sums.mean("errors", "valued") ** 2
    return 1.0 - left / spread if spread > 1e-12 else 0.0


def advantage_row(advantages: Sequence[Tensor]) -> dict[str, float]:
    """Mean, deviation, least and largest over trained tokens; zeros where there are none."""
    names = ("advantage_mean", "advantage_std", "advantage_min", "advantage_max")
    if not advantages:
        return dict.fromkeys(names, 0.0)
    all_N = torch.cat([advantage_N.double() for advantage_N in advantages])
    mean, std = float(all_N.mean()), float(all_N.std(correction=0))
    return dict(zip(names, (mean, std, float(all_N.min()), float(all_N.max())), strict=True))


def age_row(selections: Sequence[Selection], version: int) -> dict[str, float]:
    """Updates between sampling and training, over the trained trajectories; zeros where there are none."""
    ages = [age(scored.trajectory, version) for selection in selections for scored in selection.scored]
    return {"age_mean": sum(ages) / len(ages) if ages else 0.0, "age_max": float(max(ages, default=0))}


def batch_row(minis: Sequence[MiniBatch], selections: Sequence[Selection]) -> dict[str, float]:
    """What the batch was: tokens, groups, and trajectories as the filters counted them."""
    counts: Counter[str] = Counter()
    for selection in selections:
        counts.update(selection.counts)
    tokens = sum(mini.tokens for mini in minis)
    computed = sum(mini.tokens / (1.0 - mini.padding_share) for mini in minis)
    kinds = ("total", "trained", "masked", "ungraded", "stale", "canary", "uniform", "lonely")
    return {
        "tokens": float(tokens),
        "trained_tokens": float(sum(mini.trained_tokens for mini in minis)),
        "padding_share": 1.0 - tokens / computed if computed else 0.0,
        "groups": float(len(selections)),
        "groups_uniform": float(sum(selection.uniform for selection in selections)),
        "groups_informative": float(sum(selection.informative for selection in selections)),
        **{f"trajectories_{kind}": float(counts[kind]) for kind in kinds},
    }


def shared_row(minis: Sequence[MiniBatch]) -> dict[str, float]:
    """The share of tokens that were computed once for several samples."""
    tokens = sum(mini.tokens for mini in minis)
    return {"shared": 1.0 - sum(mini.computed for mini in minis) / tokens if tokens else 0.0}
