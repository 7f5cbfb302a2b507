import asyncio
import gc
import os
import signal

import pytest

from deepswe.session.interrupt import run_to_end


def test_sigterm_ends_a_run_though_its_loop_is_full_of_wakeups() -> None:
    closed = []

    async def busy() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(100_000):  # fills the pipe through which a loop is woken
            loop.call_soon_threadsafe(int)
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(20)
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(busy())
    assert closed == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_garbage_is_searched_for_less_often_while_it_runs_and_not_among_what_was_loaded() -> None:
    before = gc.get_threshold()

    async def look() -> tuple[int, int]:
        return gc.get_threshold()[0], gc.get_freeze_count()

    threshold, frozen = run_to_end(look())
    assert threshold > before[0]
    assert frozen > 0
    assert gc.get_threshold() == before
