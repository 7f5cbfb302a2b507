"""Deadlines strike in time and in their order, unless they are called off."""

import asyncio

from deepswe.sandbox.deadlines import GRAIN_S, Deadlines, call_off, running_deadlines
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
