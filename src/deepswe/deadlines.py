"""Many deadlines that hardly ever strike, at a small part of what an event loop's own timers cost."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
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


class _Last(threading.local):
    """Of each thread, which runs one event loop at a time."""

    deadlines: Deadlines | None = None


_last = _Last()


def running_deadlines() -> Deadlines:
    """Those of the running event loop: the same for all that ask one after another on one loop."""
    loop, found = asyncio.get_running_loop(), _last.deadlines
    if found is None or found.loop is not loop:
        found = _last.deadlines = Deadlines(loop)
    return found


class _Within:
    """See `within`."""

    __slots__ = ("_cancelling", "_delay_s", "_struck", "_task", "_ticket")

    def __init__(self, delay_s: float) -> None:
        self._delay_s, self._struck = delay_s, False

    def __enter__(self) -> None:
        deadlines = running_deadlines()
        task = asyncio.current_task(deadlines.loop)
        if task is None:
            raise RuntimeError("a deadline cancels the task that it is set in, and there is none here")
        self._task, self._cancelling = task, task.cancelling()
        self._ticket = deadlines.set(self._delay_s, self._strike)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call_off(self._ticket)
        # With more requests to cancel than there were before, somebody else made one.
        if self._struck and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _strike(self) -> None:
        self._struck = True
        self._task.cancel()


def within(delay_s: float) -> AbstractContextManager[None]:
    """`asyncio.timeout` as one of `running_deadlines`, so up to `GRAIN_S` late: ``with within(seconds): await ...``.

    The task is cancelled when the time is over, and that cancellation ends here; one that came from elsewhere goes on.

    Raises:
        TimeoutError: the time was over.
    """
    return _Within(delay_s)
