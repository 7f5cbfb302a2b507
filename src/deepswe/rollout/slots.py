"""Places for attempts in flight, shared by training and evaluation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Slots:
    """So many attempts at once. Whoever waits comes before whoever only tries; not bound to a loop while nobody waits.

    Args:
        capacity: attempts in flight at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0
        self.on_free: Callable[[], None] = lambda: None
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> bool:
        """Whether a place is free that nobody waits for."""
        return not self._waiting and self.taken < self.capacity

    def try_take(self) -> bool:
        """Take a place if one is free and nobody waits for it."""
        if not self.free:
            return False
        self.taken += 1
        return True

    def give(self) -> None:
        """Give a place back: to who waits longest, else `on_free` is called."""
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_result(None)
                return
        self.taken -= 1
        self.on_free()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """A place for the length of the block; waits for one. Every holder is bounded by its attempt's own limits."""
        if not self.try_take():
            ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(ticket)
            try:
                await ticket
            except asyncio.CancelledError:
                if ticket.done() and not ticket.cancelled():
                    self.give()  # the place came in the moment of the cancellation
                raise
        try:
            yield
        finally:
            self.give()
