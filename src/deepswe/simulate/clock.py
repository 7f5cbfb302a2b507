"""An event loop in virtual time: it never sleeps, but sets its clock forward to whatever is due next."""

from __future__ import annotations

import asyncio
import selectors
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from deepswe.errors import RunError

Result = TypeVar("Result")


class _Selector(selectors.DefaultSelector):
    """Does not wait: a wait moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RunError(f"everything waits for ever after {self.now:.1f} s of virtual time: this would hang")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop for simulations. Nothing in it may use threads, pipes or sockets: it would not wait for them."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        # Sums of many floats: what is due within a microsecond is due now.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now


def run_virtual(work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end in virtual time. SIGINT and SIGTERM cancel it: all closes, and it ends in KeyboardInterrupt.

    Raises:
        RunError: everything waits for something that never comes.
    """

    async def guarded() -> Result:
        task = asyncio.ensure_future(work)
        with _cancelled_by_sigterm(task):
            return await task

    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(guarded())
    except asyncio.CancelledError as cancelled:
        raise KeyboardInterrupt from cancelled


@contextmanager
def _cancelled_by_sigterm(task: asyncio.Future[Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone may take signals
        yield
        return
    loop = task.get_loop()
    before = signal.signal(signal.SIGTERM, lambda number, frame: loop.call_soon_threadsafe(task.cancel))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
