"""An event loop in virtual time: it never sleeps, but sets its clock forward to whatever is due next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
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
    """Run to the end in virtual time.

    Raises:
        RunError: everything waits for something that never comes.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
