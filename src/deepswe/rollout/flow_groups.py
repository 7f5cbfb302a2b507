"""What a flow of rollouts keeps in mind: its plan, the groups in flight, and their segments in the store."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from deepswe.envs.base import HasId
from deepswe.rollout.agent import CUT
from deepswe.rollout.attempt import Attempt, Cut
from deepswe.rollout.store import Segment
from deepswe.types import Ending, Trajectory, Ungraded


@dataclass(frozen=True, slots=True)
class FlowPlan:
    """What is to be made.

    Attributes:
        phase: under which the store keeps it.
        steps: of the whole run.
        groups: that one step trains.
        attempts: of one group.
        temperature: of sampling.
        retried: endings after which an attempt is made again.
    """

    phase: str
    steps: int
    groups: int
    attempts: int
    temperature: float
    retried: frozenset[Ending]


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that is neither trained nor dropped, or dropped and not yet over."""

    number: int
    drawn: int
    task: HasId
    opened: int
    waiting: deque[Attempt]
    running: dict[int, Cut] = field(default_factory=dict)
    over: dict[int, Trajectory] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None

    @property
    def complete(self) -> bool:
        """Whether all its attempts are over."""
        return not self.waiting and not self.running


@dataclass(slots=True, eq=False)
class DrawnGroups:
    """The groups that one step drew: their segment in the store, and those of them that are not over and settled."""

    segment: Segment
    unfinished: set[int] = field(default_factory=set)


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first, out of whatever groups it is in."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def never_begun(attempt: Attempt, why: str) -> Trajectory:
    """The record of an attempt that was cut while it waited."""
    return Trajectory(
        task_id=attempt.task_id,
        attempt=attempt.attempt,
        phase=attempt.phase,
        step=attempt.step,
        spans=(),
        steps=(),
        ending=Ending.ENV_TIMEOUT,
        grade=Ungraded(f"cut before it began: {why}", CUT),
        seed=attempt.seed,
    )
