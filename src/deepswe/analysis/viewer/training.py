"""What an attempt meant for training: the advantage of each of its turns, or why it did not train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from deepswe.algorithms.filters import select_groups
from deepswe.analysis.record import RunRecord
from deepswe.config import AlgorithmConfig, Recipe
from deepswe.rollout.group import form_groups
from deepswe.types import Trajectory


@dataclass(frozen=True, slots=True)
class Trained:
    """The part of one attempt in its update.

    Attributes:
        role: "trained", or one phrase that says why not.
        advantages: one a turn; empty unless trained, and where the algorithm takes them from a value function.
    """

    role: str
    advantages: tuple[float, ...] = ()


def algorithm_of(run: RunRecord) -> AlgorithmConfig | None:
    """The algorithm of a run, None where its recipe is missing or of another version."""
    try:
        return Recipe.model_validate(run.recipe).algorithm
    except ValidationError:
        return None


def trained_parts(
    batch: Sequence[Trajectory], algorithm: AlgorithmConfig | None
) -> Mapping[tuple[str, int, str, int], Trained]:
    """Key -> what each attempt of one recorded batch meant, computed anew from the rewards.

    Args:
        batch: of one phase and step. Where a step drew several times, each draw is a batch here.
        algorithm: of the run; None gives nothing, and so does a phase that is not "train...".
    """
    if algorithm is None or not batch or not batch[0].phase.startswith("train"):
        return {}
    version = max((span.version for t in batch for span in t.spans if span.sampled), default=0)
    groups = [group.trajectories for group in form_groups(batch)]
    found = {}
    for group, selection in zip(groups, select_groups(groups, algorithm, version=version), strict=True):
        scored = {id(one.trajectory): one.advantages for one in selection.scored}
        for trajectory in group:
            advantages = scored.get(id(trajectory))
            if advantages is None:
                found[trajectory.key] = Trained(_reason(trajectory, algorithm, uniform=selection.uniform))
            else:
                found[trajectory.key] = Trained("trained", () if algorithm.advantage == "gae" else advantages)
    return found


def _reason(trajectory: Trajectory, algorithm: AlgorithmConfig, *, uniform: bool) -> str:
    if trajectory.reward is None:
        return "no verdict, so no reward"
    if not algorithm.endings.of(trajectory.ending).train:
        return f"the ending {trajectory.ending.value} does not train"
    return "all rewards of its group are equal" if uniform else "left out by a filter"
