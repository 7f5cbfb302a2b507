"""Groups: the attempts at one task that were drawn together. A group is never split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepswe.types import Trajectory


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts at one task that one step drew, in the order of their attempt numbers."""

    task_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of those that have a verdict."""
        return tuple(t.reward for t in self.trajectories if t.reward is not None)


def form_groups(trajectories: Iterable[Trajectory]) -> tuple[Group, ...]:
    """Collect trajectories by the step that drew them and by task, sorted, so that the order in which they finished
    does not matter.

    Raises:
        ValueError: two trajectories have the same key.
    """
    drawn: dict[tuple[int, str], dict[int, Trajectory]] = {}
    for trajectory in trajectories:
        attempts = drawn.setdefault((trajectory.step, trajectory.task_id), {})
        if trajectory.attempt in attempts:
            raise ValueError(f"attempt {trajectory.attempt} of task {trajectory.task_id} is in the batch twice")
        attempts[trajectory.attempt] = trajectory
    return tuple(
        Group(task_id, tuple(attempts[number] for number in sorted(attempts)))
        for (_, task_id), attempts in sorted(drawn.items())
    )
