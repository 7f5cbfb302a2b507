"""Filters: which trajectories of a group train, which stand in the baseline, and with what advantage (laws 2 and 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepswe.algorithms.advantages import ADVANTAGES, Advantage
from deepswe.config import AlgorithmConfig, EndingTable
from deepswe.types import Trajectory


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory that trains, and its advantage."""

    trajectory: Trajectory
    advantage: float


@dataclass(frozen=True, slots=True)
class Selection:
    """What the filters left of one group.

    Attributes:
        scored: the trajectories that train.
        uniform: the group was left out because its rewards are all equal.
        counts: trajectory counts: "total", "ungraded", "masked" (graded, but its ending does not train), "uniform",
            "lonely" (no sibling to compare with), "trained". All but the first add up to the first.
    """

    scored: tuple[Scored, ...]
    uniform: bool
    counts: Mapping[str, int]


def select_group(group: Sequence[Trajectory], algorithm: AlgorithmConfig) -> Selection:
    """Filter one group, then score what is left.

    The baseline is taken over what is left, never over what was filtered. An `Ungraded` trajectory is in neither
    set, whatever its ending. A trajectory that trains outside the baseline is compared with the baseline plus itself.
    A trained trajectory with fewer than one sibling to compare with has no advantage and is left out.

    Args:
        group: all attempts at one task in one batch.
        algorithm: names the advantage, the table of endings and whether uniform groups are dropped.
    """
    trained = [t for t in group if _trains(t, algorithm.endings)]
    baseline = [t for t in group if t.reward is not None and algorithm.endings.of(t.ending).baseline]
    ungraded = sum(t.reward is None for t in group)
    counts = Counter(total=len(group), ungraded=ungraded, masked=len(group) - ungraded - len(trained))
    uniform = algorithm.drop_uniform_groups and len({t.reward for t in [*trained, *baseline]}) == 1
    if uniform:
        counts["uniform"] = len(trained)
        return Selection((), bool(trained), counts)
    advantage = ADVANTAGES[algorithm.advantage]
    compared = [t for t in trained if any(sibling is not t for sibling in baseline)]
    scored = tuple(Scored(t, _advantage(t, baseline, advantage)) for t in compared)
    counts["lonely"] = len(trained) - len(scored)
    counts["trained"] = len(scored)
    return Selection(scored, False, counts)


def _trains(trajectory: Trajectory, endings: EndingTable) -> bool:
    return trajectory.reward is not None and endings.of(trajectory.ending).train and trajectory.sampled_length > 0


def _advantage(trajectory: Trajectory, baseline: Sequence[Trajectory], advantage: Advantage) -> float:
    """Of one trajectory among the baseline, itself put last."""
    others = [t for t in baseline if t is not trajectory]
    rewards = [t.reward for t in [*others, trajectory] if t.reward is not None]
    return advantage(rewards)[-1]
