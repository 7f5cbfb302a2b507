"""Who may start a sandbox when: places, memory and processor shares, the free memory, and the rate of starts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError
from deepswe.sandbox.base import Limits

TYPICAL_SHARE = 8
"""Most sandboxes use less than this fraction of their memory limit; the choice of concurrency counts on it."""
PER_CORE = 64
REMOTE = 64
"""Sandboxes alive at once where they do not run on this machine and the recipe gives no number."""
STARTS_PER_CORE = 4
"""Starts under way at once: more only make each one slower."""
RESERVE_MIB = 256
"""While less memory than this is available, no further sandbox is started, unless none is alive."""
LOOK_S = 0.2
GLANCE_S = 0.1
"""The host's free memory is not asked for more often: what starts in between takes far less than the reserve."""


def choose_concurrency(config: SandboxConfig, cores: int, available_mib: int) -> int:
    """How many sandboxes may be alive at once: the recipe's number, or one that cores and memory allow."""
    if config.concurrency:
        return config.concurrency
    if config.backend == "kubernetes":
        return REMOTE
    return max(1, min(PER_CORE * cores, available_mib * TYPICAL_SHARE // config.memory_mib))


@dataclass(slots=True)
class Budget:
    """What may be taken at once; a demand larger than the whole counts as the whole.

    Attributes:
        places: sandboxes.
        memory_mib, cpus: sums of their limits. Larger than the machine, since few sandboxes use all of theirs.
    """

    places: int
    memory_mib: int
    cpus: float

    def share(self, limits: Limits) -> tuple[int, float]:
        """What one sandbox takes of memory and cores."""
        return min(limits.memory_mib, self.memory_mib), min(limits.cpus, self.cpus)


def budget_of(config: SandboxConfig, concurrency: int) -> Budget:
    """Room for `concurrency` sandboxes of the recipe's size; larger ones take the room of several."""
    return Budget(concurrency, concurrency * config.memory_mib, concurrency * config.cpus)


@dataclass(slots=True)
class Admission:
    """First come, first served. Not bound to an event loop while nobody waits.

    Attributes:
        budget: what may be taken at once.
        starts: starts under way at once.
        starts_per_s: begun per second; 0 is no limit.
        free_mib: memory available to this process and its sandboxes now, or None where they do not run beside it.
    """

    budget: Budget
    starts: int
    starts_per_s: float = 0.0
    free_mib: Callable[[], int] | None = None
    taken: int = 0
    _memory: int = 0
    _cpus: float = 0.0
    _starting: int = 0
    _held: int = 0
    _short: bool = False
    _look_again: float = 0.0
    _next_start: float = 0.0
    _waiting: deque[tuple[Limits, asyncio.Future[None]]] = field(default_factory=deque)
    _queued: deque[asyncio.Future[None]] = field(default_factory=deque)
    _closed: str = ""

    def fits(self, limits: Limits) -> bool:
        """Whether it would be admitted now."""
        memory, cpus = self.budget.share(limits)
        return (
            self.taken < self.budget.places
            and self._memory + memory <= self.budget.memory_mib
            and self._cpus + cpus <= self.budget.cpus * (1 + 1e-9)
        )

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for a place."""
        return bool(self._waiting)

    def try_enter(self, limits: Limits) -> bool:
        """Take a place if one is free and nobody waits for it."""
        if self._closed or self._waiting or not self.fits(limits):
            return False
        self._take(limits)
        return True

    async def enter(self, limits: Limits) -> None:
        """Take a place, as soon as one is free. Cancelled, it takes none.

        Raises:
            SandboxError: it was closed.
        """
        if self._closed:
            raise SandboxError(self._closed)
        if self.try_enter(limits):
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((limits, ticket))
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self.leave(limits)  # the place came in the moment of the cancellation
            raise
        finally:
            self._forget(ticket)

    def leave(self, limits: Limits) -> None:
        """Give a place back."""
        memory, cpus = self.budget.share(limits)
        self.taken -= 1
        self._memory -= memory
        self._cpus -= cpus
        self._admit()

    async def begin_start(self) -> None:
        """Wait until a start may begin; `end_start` must follow unless this raises."""
        await self._queue()
        try:
            if self.starts_per_s:
                now = asyncio.get_running_loop().time()
                self._next_start = max(self._next_start, now)
                delay = self._next_start - now
                self._next_start += 1 / self.starts_per_s
                await asyncio.sleep(delay)
            self._held += 1
            try:
                while self._is_short_of_memory():  # noqa: ASYNC110  (the kernel gives no event)
                    await asyncio.sleep(LOOK_S)
            finally:
                self._held -= 1
        except BaseException:
            self.end_start()
            raise

    def end_start(self) -> None:
        """A start is over, however it ended."""
        self._starting -= 1
        while self._queued and self._starting < self.starts:
            ticket = self._queued.popleft()
            if not ticket.done():
                self._starting += 1
                ticket.set_result(None)

    def _is_short_of_memory(self) -> bool:
        """Those that wait here, or for their turn, hold a place and no memory yet."""
        alive = self.taken - self._held - len(self._queued)
        if self.free_mib is None or alive <= 0:
            return False
        now = asyncio.get_running_loop().time()
        if now >= self._look_again:
            self._look_again = now + GLANCE_S
            self._short = self.free_mib() < RESERVE_MIB
        return self._short

    async def _queue(self) -> None:
        if self._starting < self.starts:
            self._starting += 1
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queued.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self.end_start()
            elif ticket in self._queued:
                self._queued.remove(ticket)
            raise

    def close(self, reason: str) -> None:
        """Refuse everybody who waits or comes, with these words."""
        self._closed = reason
        for _, ticket in self._waiting:
            if not ticket.done():
                ticket.set_exception(SandboxError(reason))

    def _take(self, limits: Limits) -> None:
        memory, cpus = self.budget.share(limits)
        self.taken += 1
        self._memory += memory
        self._cpus += cpus

    def _admit(self) -> None:
        while self._waiting:
            limits, ticket = self._waiting[0]
            if ticket.done():
                self._waiting.popleft()
            elif self.fits(limits):
                self._waiting.popleft()
                self._take(limits)
                ticket.set_result(None)
            else:
                return

    def _forget(self, ticket: asyncio.Future[None]) -> None:
        """Take one that was cancelled out of the queue; those behind it may fit now."""
        remaining = [entry for entry in self._waiting if entry[1] is not ticket]
        if len(remaining) != len(self._waiting):
            self._waiting = deque(remaining)
            self._admit()
