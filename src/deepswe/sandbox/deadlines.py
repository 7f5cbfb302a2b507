"""Many deadlines that hardly ever strike, at a small part of what an event loop's own timers cost."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any

GRAIN_S = 0.1
"""A deadline strikes so much too late at most, and never too early."""

Calls = dict[int, tuple[Callable[..., object], tuple[Any, ...]]]
"""Those that are due together, by their numbers."""
Ticket = tuple[Calls, int]
"""What a deadline is called off by."""


class Deadlines:
    """Calls to make at some time, nearly all of which are called off before. On one event loop.

    The loop keeps its timers in a heap, each an object, and those that were cancelled stay in it for a while; here one
    is an entry in a dictionary, and the loop has one timer for all.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._due: dict[int, Calls] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._next = math.inf

    def set(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> Ticket:
        """Make this call after so many seconds, unless it is called off."""
        slot, number = math.ceil((self.loop.time() + delay_s) / GRAIN_S), next(self._numbers)
        calls = self._due.get(slot)
        if calls is None:
            calls = self._due[slot] = {}
            if slot < self._next:
                self._wake_at(slot)
        calls[number] = (call, arguments)
        return calls, number

    def _wake_at(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next, self._timer = slot, self.loop.call_at(slot * GRAIN_S, self._strike)

    def _strike(self) -> None:
        now = self.loop.time()
        for slot in sorted(slot for slot in self._due if slot * GRAIN_S <= now):
            calls = self._due.pop(slot)
            for number in calls:
                self.loop.call_soon(_make, calls, number)
        self._due = {slot: calls for slot, calls in self._due.items() if calls}
        self._next, self._timer = math.inf, None
        if self._due:
            self._wake_at(min(self._due))


def _make(calls: Calls, number: int) -> None:
    """The call, unless it was called off while it waited for its turn."""
    call, arguments = calls.pop(number, (None, ()))
    if call is not None:
        call(*arguments)


def call_off(ticket: Ticket) -> None:
    """Do not make that call; nothing where it was made."""
    calls, number = ticket
    calls.pop(number, None)


_last: list[Deadlines] = []


def running_deadlines() -> Deadlines:
    """Those of the running event loop: the same for all that ask one after another on one loop."""
    loop = asyncio.get_running_loop()
    found = next((deadlines for deadlines in _last if deadlines.loop is loop), None)
    if found is None:
        found = Deadlines(loop)
        _last[:] = [found]
    return found
