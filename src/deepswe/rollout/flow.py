"""Asynchronous rollouts: attempts are always in flight, groups form as they end, and a step takes whole groups.

The data has one order: group number n is the attempts at one task of the batch that step n // groups would draw by
itself. Groups are begun in this order, as places come free, and settled once: trained in one step, or dropped. A group
begun while step s was due may train until step s + max_age. Without over-provisioning nothing is dropped: a step waits
rather than pass by a group that would then be too old. The ledger says which groups a step trained; so after a kill
the steps since the last checkpoint repeat their updates on the same groups, groups in flight keep the attempts that
were over, and the rest is made anew.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import lru_cache
from typing import Any

from deepswe.config import AsynchronyConfig
from deepswe.envs.base import HasId
from deepswe.errors import RunError
from deepswe.rollout.agent import GRACE_S, was_cut
from deepswe.rollout.attempt import Attempt, Cut
from deepswe.rollout.flow_groups import DrawnGroups, FlowPlan, OpenGroup, first_of, never_begun
from deepswe.rollout.group import Group, form_groups
from deepswe.rollout.ledger import Ledger
from deepswe.rollout.scheduler import Batch, Scheduler
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Trajectory

STARTS = 16
"""Attempts begun in one turn of the event loop, so that what else it does is not held up."""


class Flow:
    """Keeps attempts in flight and hands out one batch after another; a context by `running`.

    Args:
        scheduler: makes the attempts; its slots bound those in flight.
        store, ledger: of the run; only this flow writes the plan's phase.
        plan: what to make.
        config: how far ahead, and what becomes of stragglers.
        draw: step -> its tasks, `plan.groups` of them; a pure function.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        store: TrajectoryStore,
        ledger: Ledger,
        *,
        plan: FlowPlan,
        config: AsynchronyConfig,
        draw: Callable[[int], Sequence[HasId]],
    ) -> None:
        self.plan, self._config, self._draw = plan, config, lru_cache(64)(draw)
        self._scheduler, self._store, self._ledger = scheduler, store, ledger
        self._quorum = max(1, math.ceil(config.quorum * plan.attempts - 1e-9))
        self._step, self._training, self._flowing, self._pump_due = 0, False, False, False
        self._live: dict[int, OpenGroup] = {}
        self._dropped: dict[int, OpenGroup] = {}
        self._queue: deque[tuple[OpenGroup, Attempt]] = deque()
        self._drawn: dict[int, DrawnGroups] = {}
        self._files = ExitStack()
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._failures: list[str] = []
        limits = scheduler.rollout
        one = limits.start_timeout_s + limits.trajectory_timeout_s + limits.grading_timeout_s + 4 * GRACE_S
        self._patience_s = one * (limits.max_retries + 1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Attempts go on in the background of the block. What is still open at its end is cut and recorded.

        Yields:
            the group of tasks in which they run; other work that must end with them may run in it, too.

        Raises:
            DeepsweError: of whichever part failed first; the others are cancelled.
        """
        try:
            with self._files:
                async with asyncio.TaskGroup() as self._tasks:
                    self._restore()
                    self._scheduler.slots.on_free = self._pump
                    yield self._tasks
                    await self._finish()
        except BaseExceptionGroup as failures:
            raise first_of(failures) from failures
        finally:
            self._flowing = False

    async def batch(self, step: int) -> tuple[Group, ...]:
        """The groups of one step, as soon as they are over; call it with one step after another.

        The weights that sample must be those of `step` updates by now.

        Raises:
            RunError: no attempt ends any more, or all of them are ended by the infrastructure.
        """
        if step in self._ledger.trained:
            return self._read_back(step)
        self._step, self._training, self._flowing = step, False, True
        self._pump()
        while True:
            self._changed.clear()
            if chosen := self._choose():
                break
            await self._next_change()
        self._ledger.train(step, [group.number for group in chosen])
        for group in chosen:
            self._leave(group)
        self._training = True
        if self._config.overprovision:
            self._drop([group for group in self._live.values() if self._deadline(group) <= step], "too old to train")
        self._pump()
        return form_groups(t for group in chosen for t in group.over.values())

    def row(self, step: int, groups: Sequence[Group]) -> dict[str, Any]:
        """Measures of the batch of one step.

        Returns:
            in_flight (attempts, now), groups_open (now), groups_dropped (since the step before), attempts_cut,
            group_age_mean and group_age_max (steps since the groups of the batch were begun).
        """
        ages = [step - self._ledger.opened[number] for number in self._ledger.trained[step]]
        return {
            "in_flight": self._scheduler.slots.taken,
            "groups_open": len(self._live),
            "groups_dropped": self._ledger.dropped_at.get(step, 0),
            "attempts_cut": sum(was_cut(t) for group in groups for t in group.trajectories),
            "group_age_mean": sum(ages) / len(ages),
            "group_age_max": max(ages),
        }

    # Choosing.

    def _deadline(self, group: OpenGroup) -> int:
        """The last step that may train it."""
        return group.opened + self._config.max_age

    def _usable(self, group: OpenGroup) -> bool:
        return group.complete or len(group.over) >= self._quorum

    def _choose(self) -> tuple[OpenGroup, ...]:
        """The groups of the step that is due, or nothing yet. Stragglers that alone hold it up are cut."""
        able = [g for g in self._live.values() if g.complete or (self._usable(g) and self._deadline(g) <= self._step)]
        able.sort(key=lambda group: (group.opened, group.number))
        chosen = able[: self.plan.groups]
        if len(chosen) < self.plan.groups or not (self._config.overprovision or self._others_can_wait(chosen)):
            return ()
        held_up = [group for group in chosen if not group.complete]
        for group in held_up:
            self._cut(group, "a step waited for it alone")
        return () if held_up else tuple(chosen)

    def _others_can_wait(self, chosen: Sequence[OpenGroup]) -> bool:
        """Whether each group that is not chosen can train in a later step before it is too old."""
        taken = set(map(id, chosen))
        deadlines = sorted(self._deadline(group) for group in self._live.values() if id(group) not in taken)
        return all(place < (deadline - self._step) * self.plan.groups for place, deadline in enumerate(deadlines))

    async def _next_change(self) -> None:
        if not self._scheduler.slots.taken and not self._queue:
            raise RunError(f"step {self._step} waits for groups, but no attempt is in flight: {len(self._live)} open")
        try:
            async with asyncio.timeout(self._patience_s):
                await self._changed.wait()
        except TimeoutError as error:
            raise RunError(
                f"no attempt has ended for {self._patience_s:.0f} s, longer than one may take with all its limits "
                f"({self._scheduler.slots.taken} in flight); something hangs: resume the run"
            ) from error

    # Beginning.

    def _pump(self) -> None:
        """Begin attempts while there are places; many at once in several turns of the event loop."""
        self._pump_due = False
        slots = self._scheduler.slots
        for _ in range(STARTS):
            if not self._flowing or not slots.free or not (self._queue or self._open_next()):
                return
            slots.try_take()
            group, attempt = self._queue.popleft()
            group.waiting.remove(attempt)
            group.running[attempt.attempt] = Cut()
            work = self._run(group, attempt)
            try:
                self._tasks.create_task(work)
            except RuntimeError:  # something failed, and all tasks are being cancelled
                work.close()
                self._flowing = False
                slots.give()
                return
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _open_next(self) -> bool:
        """Begin the next group of the data's order, unless it would be too far ahead."""
        rounds = min(self._config.max_age + 1, self.plan.steps - self._step) - self._training
        if len(self._live) >= math.ceil(rounds * self.plan.groups * (1 + self._config.overprovision) - 1e-9):
            return False
        number = len(self._ledger.opened)
        group = self._place(number, self._step)
        self._ledger.open_group(number, self._step)
        self._begin_segment(group.drawn)
        self._drawn[group.drawn].unfinished.add(number)
        self._join(group)
        return True

    def _place(self, number: int, opened: int) -> OpenGroup:
        """The group of that number, with all its attempts to make."""
        drawn, position = divmod(number, self.plan.groups)
        task = self._draw(drawn)[position]
        plan = self.plan
        batch = Batch(plan.phase, drawn, (task,), plan.attempts, plan.temperature, plan.retried)
        return OpenGroup(number, drawn, task, opened, deque(a for _, a in batch.plan(self._scheduler.seed)))

    def _join(self, group: OpenGroup) -> None:
        self._live[group.number] = group
        self._queue.extend((group, attempt) for attempt in group.waiting)

    def _begin_segment(self, drawn: int, settled: Iterable[str] = ()) -> tuple[Trajectory, ...]:
        """Open the segment of what a step drew, unless it is open; returns what is recorded in it already."""
        if drawn in self._drawn:
            return ()
        segment, known = self._store.begin(self.plan.phase, drawn, keep=True, settled=frozenset(settled))
        self._drawn[drawn] = DrawnGroups(self._files.enter_context(segment))
        return known

    # Ending.

    async def _run(self, group: OpenGroup, attempt: Attempt) -> None:
        try:
            cut = group.running[attempt.attempt]
            trajectory = await self._scheduler.attempt(group.task, attempt, self.plan.retried, cut)
            del group.running[attempt.attempt]
            self._record(group, trajectory)
        finally:
            self._scheduler.slots.give()

    def _record(self, group: OpenGroup, trajectory: Trajectory) -> None:
        self._drawn[group.drawn].segment.append(trajectory)
        group.over[trajectory.attempt] = trajectory
        self._changed.set()
        self._check_failures(trajectory)
        if group.complete:
            if group.timer is not None:
                group.timer.cancel()
            if self._ledger.settled(group.number):
                self._dropped.pop(group.number, None)
                self._finish_group(group)
        elif self._config.straggler_s and group.timer is None and len(group.over) >= self._quorum:
            loop = asyncio.get_running_loop()
            group.timer = loop.call_later(self._config.straggler_s, self._cut, group, "long after its siblings")

    def _check_failures(self, trajectory: Trajectory) -> None:
        """Stop where nothing but failures has come for as many attempts as a step has."""
        if trajectory.ending is not Ending.ERROR:
            self._failures.clear()
            return
        self._failures.append(trajectory.error)
        if len(self._failures) >= self.plan.groups * self.plan.attempts:
            raise RunError(
                f"the last {len(self._failures)} attempts were all ended by the infrastructure; the first: "
                f"{self._failures[0]}"
            )

    def _cut(self, group: OpenGroup, why: str) -> None:
        """End what runs of a group; what has not begun is recorded as it is."""
        for cut in group.running.values():
            cut(why)
        if not group.waiting:
            return
        waiting, group.waiting = list(group.waiting), deque()
        self._queue = deque(entry for entry in self._queue if entry[0] is not group)
        for attempt in waiting:
            self._record(group, never_begun(attempt, why))

    def _drop(self, groups: Sequence[OpenGroup], why: str) -> None:
        if not groups:
            return
        self._ledger.drop(self._step, [group.number for group in groups], why)
        for group in groups:
            over = group.complete
            self._dropped[group.number] = group
            self._live.pop(group.number)
            self._cut(group, why)
            if over:
                self._dropped.pop(group.number)
                self._finish_group(group)

    def _leave(self, group: OpenGroup) -> None:
        del self._live[group.number]
        self._finish_group(group)

    def _finish_group(self, group: OpenGroup) -> None:
        """It is over and settled; a segment all of whose groups are so is committed."""
        drawn = self._drawn[group.drawn]
        drawn.unfinished.discard(group.number)
        if (group.drawn + 1) * self.plan.groups <= len(self._ledger.opened):
            self._commit_if_whole(group.drawn)

    def _commit_if_whole(self, step: int) -> None:
        drawn = self._drawn.get(step)
        if drawn is not None and not drawn.unfinished:
            self._drawn.pop(step).segment.commit()

    async def _finish(self) -> None:
        """Cut what is open, wait until it is over, and commit all segments."""
        self._flowing = False
        self._drop(list(self._live.values()), "the run is over")
        try:
            async with asyncio.timeout(4 * GRACE_S):
                while self._dropped:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise RunError(f"{len(self._dropped)} groups do not end though their attempts were cut") from error
        for step in list(self._drawn):
            self._commit_if_whole(step)

    # Resuming.

    def _restore(self) -> None:
        """Take up what an earlier process left: open groups with the attempts that were over."""
        done = {step for phase, step in self._store.segments() if phase == self.plan.phase}
        by_step: dict[int, list[int]] = {}
        for number in sorted(self._ledger.opened):
            by_step.setdefault(number // self.plan.groups, []).append(number)
        for drawn, numbers in by_step.items():
            if drawn not in done:
                self._restore_segment(drawn, [self._place(number, self._ledger.opened[number]) for number in numbers])

    def _restore_segment(self, drawn: int, groups: Sequence[OpenGroup]) -> None:
        settled = [group.task.id for group in groups if self._ledger.settled(group.number)]
        known = self._begin_segment(drawn, settled)
        state = self._drawn[drawn]
        for group in groups:
            group.over = {t.attempt: t for t in known if t.task_id == group.task.id}
            group.waiting = deque(attempt for attempt in group.waiting if attempt.attempt not in group.over)
            state.unfinished.add(group.number)
            if not self._ledger.settled(group.number):
                self._join(group)
        for group in groups:
            if self._ledger.settled(group.number):
                # It was dropped, and killed before what was cut of it was recorded.
                self._cut(group, self._ledger.dropped.get(group.number, ""))
                state.unfinished.discard(group.number)
        if len(groups) == self.plan.groups:
            self._commit_if_whole(drawn)

    def _read_back(self, step: int) -> tuple[Group, ...]:
        """The batch that an earlier process put together."""
        places = [self._place(number, 0) for number in self._ledger.trained[step]]
        wanted = {(group.drawn, group.task.id) for group in places}
        recorded = [t for drawn in {drawn for drawn, _ in wanted} for t in self._store.recorded(self.plan.phase, drawn)]
        return form_groups(t for t in recorded if (t.step, t.task_id) in wanted)
