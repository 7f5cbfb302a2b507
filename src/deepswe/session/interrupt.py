"""Work on an event loop of its own that a signal ends cleanly."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

GARBAGE = 10_000
"""So many more objects than before are made until the youngest are searched."""


def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Run on a new event loop. SIGINT and SIGTERM cancel it: all closes, and it ends in KeyboardInterrupt.

    What was loaded before, half a million objects of torch and its like, is not searched for garbage any more, and
    the rest less often than Python does: attempts are records without cycles.
    """

    async def guarded() -> Result:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        # Not loop.add_signal_handler: it loses a signal that comes while the loop's own pipe is full of wake-ups.
        before = signal.signal(signal.SIGTERM, lambda number, frame: loop.call_soon_threadsafe(task.cancel))
        try:
            return await task
        finally:
            signal.signal(signal.SIGTERM, before)

    if not gc.get_freeze_count():
        gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(GARBAGE, *thresholds[1:])
    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError as cancelled:
        raise KeyboardInterrupt from cancelled
    finally:
        gc.set_threshold(*thresholds)
