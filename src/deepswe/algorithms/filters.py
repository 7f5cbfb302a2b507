"""Filters: which trajectories of a batch train, which stand in the baseline, and with what advantage (laws 2 and 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepswe.algorithms.advantages import ADVANTAGES, Advantage, discounted_returns
from deepswe.config import AlgorithmConfig
from deepswe.rollout.canaries import CANARY
from deepswe.types import TokenSpan, Trajectory


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory that trains, and the advantage of each of its turns.

    Attributes:
        advantages: one a turn, as `turns` numbers them; all the same at the level of the trajectory. For `gae`, whose
            advantages need values, its reward.
    """

    trajectory: Trajectory
    advantages: tuple[float, ...]

    @property
    def advantage(self) -> float:
        """Of the last turn: at the level of the trajectory, of all of it."""
        return self.advantages[-1]


@dataclass(frozen=True, slots=True)
class Selection:
    """What the filters left of one group.

    Attributes:
        scored: the trajectories that train.
        uniform: the group was left out because its rewards are all equal.
        counts: trajectory counts: "total", "ungraded", "masked" (graded, but its ending does not train), "stale" (too
            old), "canary" (suspicious), "uniform", "lonely" (no sibling to compare with), "trained". All but the
            first add up to the first.
    """

    scored: tuple[Scored, ...]
    uniform: bool
    counts: Mapping[str, int]

    @property
    def informative(self) -> bool:
        """Whether it has a gradient."""
        return any(any(scored.advantages) for scored in self.scored)


@dataclass
class _Candidates:
    """One group, sorted by what may become of each trajectory; `worth` is the reward that counts."""

    trained: list[Trajectory] = field(default_factory=list)
    baseline: list[Trajectory] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def select_group(group: Sequence[Trajectory], algorithm: AlgorithmConfig, *, version: int = 0) -> Selection:
    """Filter and score one group that is a batch by itself; see `select_groups`."""
    return select_groups([group], algorithm, version=version)[0]


def select_groups(
    groups: Sequence[Sequence[Trajectory]], algorithm: AlgorithmConfig, *, version: int = 0
) -> tuple[Selection, ...]:
    """Filter the groups of a batch, then score what is left.

    The baseline is taken over what is left, never over what was filtered, unless the table of endings says so. An
    `Ungraded` trajectory is in neither set, whatever its ending; nor is one that is too old or suspicious, where the
    configuration filters these. A trajectory that trains outside the baseline is compared with the baseline plus
    itself. Where attempts are compared with siblings, one without any has no advantage and is left out.

    Args:
        groups: all attempts at each task of one batch.
        algorithm: names the advantage, its level, the table of endings and what is dropped.
        version: of the weights that are about to be trained; the age of a token counts from there.
    """
    sorted_out = [_sort_out(group, algorithm, version) for group in groups]
    everywhere = [t for candidates in sorted_out for t in candidates.baseline]
    return tuple(
        _select(candidates, candidates.baseline if algorithm.grouped else everywhere, algorithm)
        for candidates in sorted_out
    )


def age(trajectory: Trajectory, version: int) -> int:
    """Updates since the oldest sampled token of a trajectory; 0 where nothing was sampled."""
    return version - min((span.version for span in trajectory.spans if span.sampled), default=version)


def turns(spans: Sequence[TokenSpan]) -> tuple[int, ...]:
    """The turn of each span, counted from 0: sampled spans that follow each other directly are one turn; else -1."""
    numbers: list[int] = []
    turn, open_turn = -1, False
    for span in spans:
        turn += span.sampled and not open_turn
        open_turn = span.sampled
        numbers.append(turn if span.sampled else -1)
    return tuple(numbers)


def turn_count(trajectory: Trajectory) -> int:
    """Turns in which something was sampled."""
    return max(turns(trajectory.spans), default=-1) + 1


def worth(trajectory: Trajectory, algorithm: AlgorithmConfig) -> float:
    """The reward as it counts: 0 where the table of endings says so.

    Raises:
        ValueError: it is ungraded; a failure is no reward.
    """
    if trajectory.reward is None:
        raise ValueError(f"attempt {trajectory.attempt} at task {trajectory.task_id} is ungraded; it has no reward")
    return 0.0 if algorithm.endings.of(trajectory.ending).zero else trajectory.reward


def _sort_out(group: Sequence[Trajectory], algorithm: AlgorithmConfig, version: int) -> _Candidates:
    found = _Candidates()
    found.counts.update(total=len(group), ungraded=0, masked=0)
    for trajectory in group:
        row = algorithm.endings.of(trajectory.ending)
        if trajectory.reward is None:
            found.counts["ungraded"] += 1
        elif algorithm.max_age and age(trajectory, version) > algorithm.max_age:
            found.counts["stale"] += 1
        elif algorithm.mask_canaries and trajectory.tags.get(CANARY):
            found.counts["canary"] += 1
        else:
            if row.baseline:
                found.baseline.append(trajectory)
            if row.train and trajectory.sampled_length > 0:
                found.trained.append(trajectory)
            else:
                found.counts["masked"] += 1
    return found


def _select(found: _Candidates, baseline: Sequence[Trajectory], algorithm: AlgorithmConfig) -> Selection:
    trained, counts = found.trained, found.counts
    rewards = {worth(t, algorithm) for t in [*trained, *found.baseline]}
    if algorithm.drop_uniform_groups and len(rewards) == 1:
        counts["uniform"] = len(trained)
        return Selection((), bool(trained), counts)
    compared = trained
    if algorithm.grouped:
        compared = [t for t in trained if any(sibling is not t for sibling in baseline)]
    if algorithm.advantage == "gae":
        scored = tuple(Scored(t, (worth(t, algorithm),) * turn_count(t)) for t in compared)
    else:
        scored = _score(compared, baseline, algorithm)
    counts["lonely"] = len(trained) - len(scored)
    counts["trained"] = len(scored)
    return Selection(scored, False, counts)


def _score(
    compared: Sequence[Trajectory], baseline: Sequence[Trajectory], algorithm: AlgorithmConfig
) -> tuple[Scored, ...]:
    function = ADVANTAGES[algorithm.advantage]
    inside = set(map(id, baseline))
    if algorithm.advantage_level == "trajectory":
        rewards = [worth(t, algorithm) for t in baseline]
        known = function(rewards) if any(id(t) in inside for t in compared) else ()
        place = {id(t): index for index, t in enumerate(baseline)}
        return tuple(
            Scored(
                t,
                (known[place[id(t)]] if id(t) in inside else function([*rewards, worth(t, algorithm)])[-1],)
                * turn_count(t),
            )
            for t in compared
        )
    returns = {
        id(t): discounted_returns(worth(t, algorithm), turn_count(t), algorithm.discount)
        for t in [*baseline, *compared]
    }
    return tuple(Scored(t, _by_turn(t, baseline, returns, function, algorithm.grouped)) for t in compared)


def _by_turn(
    trajectory: Trajectory,
    baseline: Sequence[Trajectory],
    returns: Mapping[int, tuple[float, ...]],
    function: Advantage,
    grouped: bool,
) -> tuple[float, ...]:
    """Each turn against the same turn of the others that came so far; 0 where a sibling is needed and none did."""
    advantages = []
    for turn, own in enumerate(returns[id(trajectory)]):
        others = [returns[id(t)][turn] for t in baseline if t is not trajectory and turn < len(returns[id(t)])]
        advantages.append(function([*others, own])[-1] if others or not grouped else 0.0)
    return tuple(advantages)
