"""The pool over a backend that only counts: what is started is ended, whatever is cancelled, fails or hangs."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepswe.config import SandboxConfig, build_recipe
from deepswe.envs.suites import open_suite
from deepswe.errors import ConfigError, SandboxDied, SandboxError, SandboxStartError
from deepswe.progress import Silent
from deepswe.sandbox import pool as pool_module
from deepswe.sandbox.base import ExecResult, Limits, SandboxSpec
from deepswe.sandbox.memory import MemorySandbox
from deepswe.sandbox.pool import SandboxPool

ENFORCED = dict.fromkeys(("memory_mib", "disk_mib", "pids", "output_bytes"), "counting")


@dataclass
class Counting:
    """Keeps the names of what lives; starts and ends take some turns of the loop, and starts may fail."""

    rng: random.Random
    failing: float = 0.0
    turns: int = 0
    live: dict = field(default_factory=dict)
    most: int = 0
    started: int = 0
    ended: int = 0
    hang: bool = False

    async def pause(self):
        for _ in range(self.rng.randrange(self.turns + 1)):
            await asyncio.sleep(0)

    async def start(self, name, spec, timeout_s):
        assert name not in self.live
        self.live[name] = spec
        self.started += 1
        self.most = max(self.most, len(self.live))
        await self.pause()
        if self.hang:
            await asyncio.sleep(100)
        if self.rng.random() < self.failing:
            raise SandboxStartError("by chance")  # it leaves its name for the pool to stop, as a careless backend would
        return Simulated(self, name)

    async def stop(self, name):
        await self.pause()
        if self.live.pop(name, None) is not None:
            self.ended += 1

    async def close(self):
        for name in list(self.live):
            await self.stop(name)

    def abort(self):
        self.live.clear()


class Simulated(MemorySandbox):
    def __init__(self, backend, name):
        super().__init__()
        self._id, self.backend = name, backend

    @property
    def enforced(self):
        return {**ENFORCED, "cpus": "none"}

    async def exec(self, argv, **options):
        if self._id not in self.backend.live:
            raise SandboxDied("gone")
        return ExecResult(0, b"", b"")


def opened(monkeypatch, counting, **settings):
    monkeypatch.setattr(pool_module, "open_backend", lambda config, run, directory: counting)
    return SandboxPool(SandboxConfig(**settings), "simulated")


def of_kind(name):
    return SandboxSpec(workdir=f"/{name}", limits=Limits())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    concurrency=st.integers(1, 4),
    warm=st.integers(0, 2),
    failing=st.sampled_from([0.0, 0.3]),
    turns=st.integers(0, 4),
)
def test_random_cancellation_and_failure_orphan_nothing(seed, concurrency, warm, failing, turns):
    rng = random.Random(seed)
    backend = Counting(rng, failing, turns)

    async def main():
        with pytest.MonkeyPatch.context() as patch:
            pool = opened(patch, backend, concurrency=concurrency, warm=warm)

        async def life():
            async with pool.open(of_kind(rng.choice("ab"))) as sandbox:
                assert sandbox.id in backend.live
                await backend.pause()
                await sandbox.exec(["true"], timeout_s=1)

        tasks = [asyncio.ensure_future(life()) for _ in range(15)]
        for _ in range(30):
            await asyncio.sleep(0)
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        strange = [r for r in results if r and not isinstance(r, asyncio.CancelledError | SandboxStartError)]
        assert not strange
        for _ in range(200):
            await asyncio.sleep(0)
        assert pool.alive == len(backend.live) <= 2 * warm
        assert backend.most <= concurrency
        await pool.close()
        assert not backend.live
        assert not pool._directory.exists()

    asyncio.run(main())


def test_a_warm_sandbox_is_taken_by_its_kind_only_and_given_up_when_others_wait(monkeypatch):
    backend = Counting(random.Random(1))

    async def main():
        async with opened(monkeypatch, backend, concurrency=2, warm=1) as pool:
            async with pool.open(of_kind("a")):
                await asyncio.sleep(0.01)
                assert backend.started == 2
            (warm,) = backend.live
            async with pool.open(of_kind("a")) as sandbox:
                assert sandbox.id == warm
                await asyncio.sleep(0.01)
                async with pool.open(of_kind("b")):  # there are two places: the warm one of kind a makes room
                    assert backend.most <= 2

    asyncio.run(main())
    assert not backend.live


def test_a_warm_sandbox_that_died_is_replaced(monkeypatch):
    backend = Counting(random.Random(1))

    async def main():
        async with opened(monkeypatch, backend, concurrency=4, warm=1) as pool:
            async with pool.open(of_kind("a")):
                await asyncio.sleep(0.01)
            backend.live.clear()
            async with pool.open(of_kind("a")) as sandbox:
                assert sandbox.id in backend.live

    asyncio.run(main())


def test_a_warm_sandbox_that_has_waited_long_is_not_handed_out(monkeypatch):
    backend = Counting(random.Random(1))

    async def main():
        async with opened(monkeypatch, backend, concurrency=4, warm=1, lifetime_s=2.0) as pool:
            async with pool.open(of_kind("a")):
                await asyncio.sleep(0.01)
            (warm,) = backend.live
            await asyncio.sleep(0.55)
            async with pool.open(of_kind("a")) as sandbox:
                assert sandbox.id != warm
                await asyncio.sleep(0.01)
                assert warm not in backend.live

    asyncio.run(main())


def test_a_start_whose_turn_comes_after_the_end_of_the_pool_does_not_begin(monkeypatch):
    backend = Counting(random.Random(1))

    async def main():
        pool = opened(monkeypatch, backend, concurrency=2, starts_per_s=10.0)
        async with pool.open(of_kind("a")):
            late = asyncio.ensure_future(pool.open(of_kind("a")).__aenter__())
            await asyncio.sleep(0.01)
            await pool.close()
            with pytest.raises(SandboxError, match="is closed"):
                await late
        assert backend.started == 1

    asyncio.run(main())


def test_opening_has_a_deadline_and_leaves_nothing_when_it_passes(monkeypatch):
    backend = Counting(random.Random(1))

    async def main():
        async with opened(monkeypatch, backend, concurrency=1) as pool:
            async with pool.open(of_kind("a")):
                with pytest.raises(SandboxStartError, match=r"no sandbox within 0 s: 1 of 1 are alive"):
                    async with pool.open(of_kind("a"), timeout_s=0.05):
                        pass
            backend.hang = True
            with pytest.raises(SandboxStartError, match="no sandbox within"):
                async with pool.open(of_kind("a"), timeout_s=0.05):
                    pass
            assert not backend.live
            assert pool.alive == 0

    asyncio.run(main())


def test_a_sandbox_ends_when_its_lifetime_is_over_even_in_use(monkeypatch):
    backend = Counting(random.Random(1))

    async def main():
        async with opened(monkeypatch, backend, lifetime_s=0.05) as pool, pool.open(of_kind("a")) as sandbox:
            await sandbox.exec(["true"], timeout_s=1)
            await asyncio.sleep(0.1)
            with pytest.raises(SandboxDied):
                await sandbox.exec(["true"], timeout_s=1)

    asyncio.run(main())


def test_every_sandbox_carries_run_task_owner_and_expiry(monkeypatch):
    backend = Counting(random.Random(1))

    async def main():
        async with (
            opened(monkeypatch, backend, backend="docker", image="base:1") as pool,
            pool.open(SandboxSpec(labels={"task": "t"})),
        ):
            (spec,) = backend.live.values()
            assert spec.image == "base:1"
            assert spec.labels["run"] == "simulated"
            assert spec.labels["task"] == "t"
            assert spec.labels["owner"] == pool._owner
            assert int(spec.labels["expires"]) > 1_700_000_000

    asyncio.run(main())


@pytest.mark.parametrize(
    ("spec", "threads"),
    [
        (SandboxSpec(), "1"),
        (SandboxSpec(limits=Limits(cpus=0.5)), "1"),
        (SandboxSpec(limits=Limits(cpus=2.5)), "3"),
        (SandboxSpec(env={"OMP_NUM_THREADS": "7"}), "7"),
        (SandboxSpec(image="task:1"), None),
    ],
)
def test_threads_are_those_of_the_sandbox_s_cores_but_in_a_task_s_own_image(spec, threads):
    async def run():
        backend = Counting(random.Random(0))
        async with SandboxPool(SandboxConfig(backend="docker", image="ours:1"), "r", backend) as pool, pool.open(spec):
            (started,) = backend.live.values()
            assert started.env.get("OMP_NUM_THREADS") == threads

    asyncio.run(run())


def test_a_limit_that_the_recipe_sets_and_nobody_enforces_is_refused(monkeypatch):
    async def main(**settings):
        async with opened(monkeypatch, Counting(random.Random(1)), **settings) as pool:
            await pool.check()

    asyncio.run(main())
    asyncio.run(main(pids=9))
    with pytest.raises(ConfigError, match=r"sandbox.cpus is 2.0, but bubblewrap enforces no such limit here"):
        asyncio.run(main(cpus=2.0))


def test_a_run_with_a_limit_that_nobody_enforces_is_refused_at_load(monkeypatch):
    monkeypatch.setattr(pool_module, "open_backend", lambda config, run, directory: Counting(random.Random(1)))
    tasks = {"kind": "micro", "train": 1, "heldout": 1, "unseen": 0}
    recipe = build_recipe({"run": {"name": "s"}, "tasks": tasks, "sandbox": {"cpus": 2.0}}, origin="test")

    async def main():
        async with open_suite(recipe, Silent()):
            pass

    with pytest.raises(ConfigError, match=r"sandbox.cpus is 2.0"):
        asyncio.run(main())


def test_a_closed_pool_refuses_and_frees_those_that_wait(monkeypatch):
    async def main():
        pool = opened(monkeypatch, Counting(random.Random(1)), concurrency=1)
        async with pool.open(of_kind("a")):
            waiting = asyncio.ensure_future(pool.open(of_kind("a")).__aenter__())
            await asyncio.sleep(0.01)
            await pool.close()
            with pytest.raises(SandboxError, match="closed while waiting"):
                await waiting
        with pytest.raises(SandboxError, match="is closed"):
            await pool.open(of_kind("a")).__aenter__()

    asyncio.run(main())
