"""Many attempts at once on one event loop: each with a deadline, retried when the infrastructure failed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from deepswe.config import AgentConfig, RolloutConfig
from deepswe.envs.base import HasId, Suite
from deepswe.errors import RunError
from deepswe.policy.base import Policy, Renderer
from deepswe.rollout.agent import run_attempt
from deepswe.rollout.attempt import Attempt, Cut, derive_seed
from deepswe.rollout.canaries import canary_tags
from deepswe.rollout.slots import Slots
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Trajectory


@dataclass(frozen=True, slots=True)
class Batch:
    """What to attempt: `attempts` tries at each task, under one (phase, step).

    An attempt that ends in one of `retried` is made again, at most `rollout.max_retries` times.
    """

    phase: str
    step: int
    tasks: tuple[HasId, ...]
    attempts: int
    temperature: float
    retried: frozenset[Ending] = frozenset({Ending.ERROR})

    def plan(self, seed: int) -> tuple[tuple[HasId, Attempt], ...]:
        """Every attempt with its own seed, in a fixed order."""
        return tuple(
            (
                task,
                Attempt(
                    task_id=task.id,
                    attempt=number,
                    phase=self.phase,
                    step=self.step,
                    seed=derive_seed(seed, self.phase, self.step, task.id, number),
                    temperature=self.temperature,
                ),
            )
            for task in self.tasks
            for number in range(self.attempts)
        )


class Scheduler:
    """Runs batches of attempts.

    Args:
        concurrency: attempts in flight at once, whatever asks for them.
        seed: of the run; each attempt's own seed derives from it.
        rehearsal: attempts are made in the suite's rehearsal environments and not graded.
    """

    def __init__(
        self,
        suite: Suite,
        policy: Policy,
        renderer: Renderer,
        *,
        rollout: RolloutConfig,
        agent: AgentConfig,
        concurrency: int,
        seed: int,
        rehearsal: bool = False,
    ) -> None:
        self._suite, self._policy, self._renderer = suite, policy, renderer
        self._agent = agent
        self.slots, self.seed, self.rollout = Slots(concurrency), seed, rollout
        self._open = suite.rehearse if rehearsal else suite.open
        self._graded = not rehearsal

    async def collect(
        self,
        batch: Batch,
        *,
        known: Sequence[Trajectory] = (),
        record: Callable[[Trajectory], None] = lambda trajectory: None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> tuple[Trajectory, ...]:
        """All trajectories of a batch, in the order of its plan.

        Args:
            batch: what to attempt.
            known: trajectories of this batch that an earlier process made; they are not made again.
            record: called with each new trajectory as soon as it is over, before anything else can fail.
            go_on: asked before each attempt; once it says no, those in flight are the last, and the rest is left out.

        Raises:
            RunError: every attempt of the batch was ended by the infrastructure; quotes the first failure.
        """
        done = {(t.task_id, t.attempt): t for t in known}
        plan = batch.plan(self.seed)
        todo = [(task, attempt) for task, attempt in plan if (attempt.task_id, attempt.attempt) not in done]

        async def one(task: HasId, attempt: Attempt) -> None:
            async with self.slots.held():
                trajectory = await self.attempt(task, attempt, batch.retried)
            record(trajectory)
            done[attempt.task_id, attempt.attempt] = trajectory

        names = [attempt.name for _, attempt in todo]
        async with self._policy.cohort(names, width=self.slots.capacity):
            await self._stream(todo, one, go_on)
        keys = ((attempt.task_id, attempt.attempt) for _, attempt in plan)
        trajectories = tuple(done[key] for key in keys if key in done)
        failed = [t for t in trajectories if t.ending is Ending.ERROR]
        if failed and len(failed) == len(trajectories):
            raise RunError(
                f"all {len(failed)} attempts of {batch.phase} step {batch.step} were ended by the infrastructure; "
                f"the first: {failed[0].error}"
            )
        return trajectories

    async def _stream(
        self,
        todo: Sequence[tuple[HasId, Attempt]],
        one: Callable[[HasId, Attempt], Awaitable[None]],
        go_on: Callable[[], bool],
    ) -> None:
        waiting = itertools.takewhile(lambda item: go_on(), todo)

        async def worker() -> None:
            for task, attempt in waiting:
                await one(task, attempt)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.slots.capacity, len(todo))):
                    group.create_task(worker())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first, such as a full disk, ended the others

    async def attempt(
        self, task: HasId, attempt: Attempt, retried: frozenset[Ending], cut: Cut | None = None
    ) -> Trajectory:
        """One attempt, made again while it ends in one of `retried`, at most `rollout.max_retries` times.

        The caller holds one of `slots`.

        Args:
            task, attempt: which.
            retried: endings after which it is made again.
            cut: ends it from outside, see `run_attempt`; it is not made again then.
        """
        cut = cut or Cut()
        while True:
            trajectory = await run_attempt(
                self._open(task, seed=attempt.seed),
                self._policy,
                self._renderer,
                attempt,
                rollout=self.rollout,
                agent=self._agent,
                graded=self._graded,
                cut=cut,
            )
            if cut.reason or trajectory.ending not in retried or attempt.retries >= self.rollout.max_retries:
                return replace(trajectory, tags={**self._suite.describe(task), **canary_tags(trajectory)})
            attempt = replace(attempt, retries=attempt.retries + 1)


async def collect_recorded(
    scheduler: Scheduler,
    store: TrajectoryStore,
    batch: Batch,
    *,
    keep: bool,
    on_done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> tuple[Trajectory, ...]:
    """A batch, from the store where it is committed, else made and committed.

    Args:
        keep: take up what a killed process had finished of this batch. False makes the whole batch anew, which
            lock-step needs, because the numbers depend on who shares a forward pass.
        on_done: called for each trajectory when it is recorded, or found recorded.

    Raises:
        RunError, StoreError: as `Scheduler.collect` and `TrajectoryStore`.
    """
    found = store.committed(batch.phase, batch.step)
    if found is not None:
        for trajectory in found:
            on_done(trajectory)
        return found
    segment, known = store.begin(batch.phase, batch.step, keep=keep)
    for trajectory in known:
        on_done(trajectory)

    def record(trajectory: Trajectory) -> None:
        segment.append(trajectory)
        on_done(trajectory)

    with segment:
        trajectories = await scheduler.collect(batch, known=known, record=record)
        segment.commit()
    return tuple(sorted(trajectories, key=lambda trajectory: trajectory.key))
