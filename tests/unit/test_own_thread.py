import asyncio
import contextvars
import threading
import time

import pytest

from deepswe.own_thread import OwnThread

NAME = contextvars.ContextVar("NAME", default="")


def test_all_work_is_done_in_one_thread_that_is_not_the_callers():
    async def look():
        with OwnThread("learner") as thread:
            one_by_one = [await thread(threading.current_thread) for _ in range(3)]
            return [*one_by_one, *await asyncio.gather(*(thread(threading.current_thread) for _ in range(3)))]

    seen = asyncio.run(look())
    assert len(set(seen)) == 1
    assert seen[0] is not threading.current_thread()
    assert seen[0].name.startswith("learner")


def test_outcomes_errors_and_the_context_of_the_caller_go_through():
    async def work():
        NAME.set("here")
        with OwnThread("learner") as thread:
            assert await thread(lambda *a, **o: (NAME.get(), a, o), 1, two=2) == ("here", (1,), {"two": 2})
            with pytest.raises(ZeroDivisionError):
                await thread(lambda: 1 / 0)
            assert await thread(lambda: "goes on") == "goes on"

    asyncio.run(work())


def test_a_thread_that_was_left_takes_no_work():
    async def work():
        with OwnThread("learner") as thread:
            await thread(int)
        with pytest.raises(RuntimeError):
            await thread(int)

    asyncio.run(work())


def test_the_event_loop_ends_after_the_work_of_those_who_were_cancelled():
    begun, done = threading.Event(), []

    def work():
        begun.set()
        time.sleep(0.3)
        done.append("update")

    async def cancelled():
        with OwnThread("learner") as thread:
            task = asyncio.ensure_future(thread(work))
            await asyncio.to_thread(begun.wait)
            queued = asyncio.ensure_future(thread(done.append, "queued"))
            await asyncio.sleep(0.0)  # until it is
            queued.cancel()
            task.cancel()
            await asyncio.wait([task, queued])
            assert task.cancelled()
            assert queued.cancelled()
            assert done == []

    asyncio.run(cancelled())
    assert done == ["update"]
