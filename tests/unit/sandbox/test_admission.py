"""Admission, by plain arithmetic and under random cancellation."""

import asyncio
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError
from deepswe.sandbox import admission
from deepswe.sandbox.admission import Admission, Budget, budget_of, choose_concurrency
from deepswe.sandbox.base import Limits

SMALL, LARGE = Limits(memory_mib=100, cpus=1.0), Limits(memory_mib=300, cpus=2.0)


def test_a_large_sandbox_takes_the_room_of_several():
    gate = Admission(Budget(places=10, memory_mib=400, cpus=10), starts=9)
    assert gate.try_enter(LARGE)
    assert gate.try_enter(SMALL)
    assert not gate.try_enter(SMALL)
    gate.leave(LARGE)
    assert gate.try_enter(SMALL)


def test_a_demand_above_the_whole_is_the_whole():
    gate = Admission(Budget(places=10, memory_mib=50, cpus=0.5), starts=9)
    assert gate.try_enter(LARGE)
    assert not gate.try_enter(SMALL)
    gate.leave(LARGE)
    assert gate.try_enter(SMALL)


def test_processor_shares_bound_too():
    gate = Admission(Budget(places=10, memory_mib=10_000, cpus=3), starts=9)
    assert [gate.try_enter(SMALL) for _ in range(4)] == [True, True, True, False]


def test_the_first_that_waits_is_served_first_even_if_a_smaller_one_would_fit():
    async def main():
        gate = Admission(Budget(places=10, memory_mib=400, cpus=10), starts=9)
        gate.try_enter(LARGE)
        order = []

        async def come(name, limits):
            await gate.enter(limits)
            order.append(name)

        tasks = [asyncio.ensure_future(come(*one)) for one in (("large", LARGE), ("small", SMALL))]
        await asyncio.sleep(0)
        assert order == []
        gate.leave(LARGE)
        await asyncio.gather(*tasks)
        assert order == ["large", "small"]

    asyncio.run(main())


def test_one_that_gives_up_lets_those_behind_it_in():
    async def main():
        gate = Admission(Budget(places=10, memory_mib=400, cpus=10), starts=9)
        gate.try_enter(LARGE)
        large, small = asyncio.ensure_future(gate.enter(LARGE)), asyncio.ensure_future(gate.enter(SMALL))
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait((small,), timeout=1)
        assert small.done()
        assert gate.taken == 2

    asyncio.run(main())


def test_starts_are_spread_over_time():
    async def main():
        gate = Admission(Budget(10, 10_000, 10), starts=9, starts_per_s=50)
        started = time.monotonic()
        for _ in range(6):
            await gate.begin_start()
            gate.end_start()
        assert time.monotonic() - started >= 5 / 50

    asyncio.run(main())


def test_starts_wait_while_the_host_is_short_of_memory_unless_none_is_alive():
    async def main():
        free = [10]
        gate = Admission(Budget(10, 10_000, 10), starts=9, free_mib=lambda: free[0])
        gate.try_enter(SMALL)
        await asyncio.wait_for(gate.begin_start(), 1)
        gate.try_enter(SMALL)
        second = asyncio.ensure_future(gate.begin_start())
        await asyncio.sleep(0.3)
        assert not second.done()
        free[0] = 5000
        await asyncio.wait_for(second, 2)

    asyncio.run(main())


def test_of_several_starts_without_memory_one_goes_on_while_none_is_alive():
    async def main():
        gate = Admission(Budget(10, 10_000, 10), starts=2, free_mib=lambda: 10)
        for _ in range(3):
            assert gate.try_enter(SMALL)
        starts = [asyncio.ensure_future(gate.begin_start()) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert [start.done() for start in starts] == [True, False, False]
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)

    asyncio.run(main())


def test_closing_refuses_those_that_wait_and_those_that_come():
    async def main():
        gate = Admission(Budget(1, 1000, 10), starts=9)
        gate.try_enter(SMALL)
        waiting = asyncio.ensure_future(gate.enter(SMALL))
        await asyncio.sleep(0)
        gate.close("it is closed")
        with pytest.raises(SandboxError, match="it is closed"):
            await waiting
        with pytest.raises(SandboxError, match="it is closed"):
            await gate.enter(SMALL)

    asyncio.run(main())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4))
def test_random_cancellation_never_loses_or_doubles_a_place(seed, places, starts):
    rng = random.Random(seed)

    async def main():
        gate = Admission(Budget(places, places * 200, places * 1.5), starts=starts)
        inside = most = begun = 0

        async def life():
            nonlocal inside, most, begun
            limits = rng.choice((SMALL, LARGE))
            await gate.enter(limits)
            inside += 1
            most = max(most, inside)
            try:
                await gate.begin_start()
                begun += 1
                try:
                    assert begun <= starts
                    await asyncio.sleep(0)
                finally:
                    begun -= 1
                    gate.end_start()
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside -= 1
                gate.leave(limits)

        tasks = [asyncio.ensure_future(life()) for _ in range(25)]
        for _ in range(40):
            await asyncio.sleep(0)
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [result for result in results if result and not isinstance(result, asyncio.CancelledError)]
        assert most <= places
        assert gate.taken == 0
        for _ in range(places):
            assert gate.try_enter(Limits(memory_mib=200, cpus=1.5))

    asyncio.run(main())


def test_concurrency_is_the_recipes_or_what_cores_and_memory_allow():
    config = SandboxConfig(memory_mib=1024)
    assert choose_concurrency(config, cores=2, available_mib=24_000) == 128
    assert choose_concurrency(SandboxConfig(backend="kubernetes"), cores=2, available_mib=100) == 64
    assert budget_of(SandboxConfig(memory_mib=10, cpus=0.5), 4) == Budget(4, 40, 2.0)


def test_starts_of_one_moment_look_at_the_free_memory_once():
    async def main():
        looks = []
        gate = Admission(Budget(100, 100_000, 100), starts=99, free_mib=lambda: looks.append(1) or 5000)
        for _ in range(20):
            gate.try_enter(SMALL)
            await gate.begin_start()
        assert len(looks) < 20
        await asyncio.sleep(2 * admission.GLANCE_S)
        seen = len(looks)
        await gate.begin_start()
        assert len(looks) == seen + 1

    asyncio.run(main())
