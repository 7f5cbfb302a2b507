import asyncio
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
