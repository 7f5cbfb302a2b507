"""Deadlines strike in time and in their order, unless they are called off."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepswe.deadlines import GRAIN_S, Deadlines, call_off, running_deadlines, within
from deepswe.simulate.clock import run_virtual


def test_calls_are_made_in_time_and_in_order_but_those_called_off():
    async def work():
        deadlines, made = Deadlines(asyncio.get_running_loop()), []
        now = deadlines.loop.time
        tickets = {
            delay: deadlines.set(delay, lambda d=delay: made.append((d, now()))) for delay in (9.0, 1.0, 5.03, 0.0)
        }
        call_off(tickets[9.0])
        call_off(tickets[9.0])
        await asyncio.sleep(2.0)
        call_off(tickets[1.0])
        deadlines.set(1.0, lambda: made.append((3.0, now())))
        await asyncio.sleep(20.0)
        assert [delay for delay, _ in made] == [0.0, 1.0, 3.0, 5.03]
        assert all(delay <= at < delay + GRAIN_S + 1e-5 for delay, at in made)

    run_virtual(work())


def test_a_call_that_sets_another_is_no_trouble():
    async def work():
        deadlines, made = Deadlines(asyncio.get_running_loop()), []
        deadlines.set(1.0, deadlines.set, 1.0, made.append, "second")
        await asyncio.sleep(1.5)
        assert made == []
        await asyncio.sleep(1.0)
        assert made == ["second"]

    run_virtual(work())


def test_a_call_that_is_called_off_by_one_of_the_same_time_is_not_made():
    async def work():
        deadlines, made = Deadlines(asyncio.get_running_loop()), []
        tickets = []
        deadlines.set(1.0, lambda: call_off(tickets[0]))
        tickets.append(deadlines.set(1.0, made.append, "called off"))
        await asyncio.sleep(3.0)
        assert made == []

    run_virtual(work())


def test_each_event_loop_has_its_own():
    async def both():
        return running_deadlines(), running_deadlines()

    first, same = asyncio.run(both())
    other, _ = asyncio.run(both())
    assert first is same
    assert first is not other


def test_threads_with_loops_of_their_own_do_not_take_each_others():
    async def asked(barrier):
        first = running_deadlines()
        await asyncio.to_thread(barrier.wait)
        return first, running_deadlines()

    barrier = threading.Barrier(2, timeout=10)
    with ThreadPoolExecutor() as threads:
        (first, same), (other, other_same) = threads.map(asyncio.run, [asked(barrier), asked(barrier)])
    assert first is same
    assert other is other_same
    assert first is not other


def test_what_takes_longer_is_a_timeout_and_the_task_goes_on():
    async def work():
        now = asyncio.get_running_loop().time
        with pytest.raises(TimeoutError) as raised, within(5.0):
            await asyncio.sleep(60.0)
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        assert 5.0 <= now() < 5.0 + GRAIN_S + 1e-5
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(60.0)

    run_virtual(work())


@pytest.mark.parametrize("delay_s", [0.0, -1.0])
def test_a_time_that_is_over_already_is_one(delay_s):
    async def work():
        with pytest.raises(TimeoutError), within(delay_s):
            await asyncio.sleep(GRAIN_S * 2)

    run_virtual(work())


def test_what_ends_in_time_is_left_alone_whatever_it_ends_in():
    async def work():
        with within(1.0):
            await asyncio.sleep(0.5)
        with pytest.raises(ValueError, match="own"), within(1.0):
            raise ValueError("own")
        with pytest.raises(asyncio.CancelledError), within(1.0):
            raise asyncio.CancelledError
        await asyncio.sleep(10.0)

    run_virtual(work())


def test_an_error_of_its_own_after_the_deadline_is_that_error():
    async def work():
        async def failing():
            try:
                await asyncio.sleep(10.0)
            except asyncio.CancelledError:
                raise ValueError("own") from None

        with pytest.raises(ValueError, match="own"), within(1.0):
            await failing()
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(10.0)

    run_virtual(work())


def test_a_cancellation_from_outside_goes_on():
    async def work():
        async def inside():
            with within(10.0):
                await asyncio.sleep(60.0)

        task = asyncio.ensure_future(inside())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run_virtual(work())


@pytest.mark.parametrize("first", ["outside", "deadline"])
def test_a_cancellation_from_outside_goes_on_even_when_the_deadline_strikes_at_once(first):
    async def work():
        async def inside():
            with within(1.0):
                await asyncio.sleep(60.0)

        task = asyncio.ensure_future(inside())
        if first == "deadline":
            await asyncio.sleep(0.0)  # until it is set; those of one time are made in the order in which they were set
        running_deadlines().set(1.0, task.cancel)
        await asyncio.wait([task])
        assert task.cancelled()

    run_virtual(work())


def test_a_deadline_in_the_moment_in_which_its_wait_is_over_still_strikes():
    async def work():
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        deadlines = running_deadlines()
        deadlines.set(1.0, answer.set_result, "in time")
        with pytest.raises(TimeoutError), within(1.0):
            await answer
        assert answer.result() == "in time"

    run_virtual(work())


@pytest.mark.parametrize(
    ("outer_s", "inner_s", "caught_by"), [(1.0, 5.0, "outer"), (5.0, 1.0, "inner"), (1.0, 1.0, "outer")]
)
def test_of_nested_ones_the_first_to_strike_is_the_one_that_did(outer_s, inner_s, caught_by):
    async def work():
        caught = []
        try:
            with within(outer_s):
                try:
                    with within(inner_s):
                        await asyncio.sleep(60.0)
                except TimeoutError:
                    caught.append("inner")
        except TimeoutError:
            caught.append("outer")
        assert caught == [caught_by]
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(60.0)

    run_virtual(work())


def test_outside_of_a_task_there_is_none():
    async def work():
        failed = asyncio.get_running_loop().create_future()

        def enter():
            try:
                with within(1.0):
                    pass
            except RuntimeError as error:
                failed.set_result(str(error))

        asyncio.get_running_loop().call_soon(enter)
        assert "there is none here" in await failed

    run_virtual(work())


def test_loops_one_after_another_have_each_their_deadlines():
    async def work():
        with pytest.raises(TimeoutError), within(1.0):
            await asyncio.sleep(60.0)

    for _ in range(3):
        run_virtual(work())
