"""Every second of a run is somebody's, and what is ours is not counted as another's."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from deepswe.config import FrozenLakeTasks
from deepswe.envs.base import Environment
from deepswe.envs.frozenlake import FrozenLakeSuite
from deepswe.errors import RunError
from deepswe.policy.base import Sampling
from deepswe.policy.scripted import ByteRenderer, ScriptedPolicy
from deepswe.session.profile import (
    ProfiledPolicy,
    ProfiledSuite,
    Profiler,
    clock_of_this_thread,
    describe_profile,
    write_profile,
)


class Clock:
    """Two clocks that move when they are told."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def pass_(self, waited: float, computed: float = 0.0) -> None:
        self.wall += waited + computed
        self.cpu += computed


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def profiler(clock: Clock) -> Profiler:
    return Profiler(lambda: clock.wall, lambda: clock.cpu)


def test_waiting_is_for_who_is_at_work_and_computing_is_ours(clock: Clock, profiler: Profiler) -> None:
    clock.pass_(1.0, 0.5)  # alone
    with profiler.inside("sandbox"):
        clock.pass_(2.0, 0.25)
        with profiler.inside("model"), profiler.inside("model"):
            clock.pass_(4.0)
        clock.pass_(8.0)
    with profiler.inside("learner"), profiler.inside("model"):
        clock.pass_(16.0)
    row = profiler.row()
    assert (row["sandbox_s"], row["model_s"], row["learner_s"]) == (10.0, 4.0, 16.0)
    assert (row["loop_s"], row["alone_s"], row["ours_s"]) == (0.75, 1.0, 1.75)
    assert row["wall_s"] == clock.wall == 31.75


def test_what_the_loop_computes_beside_another_thread_is_told_and_how_long_that_waited() -> None:
    clock, other = Clock(), Clock()
    profiler = Profiler(lambda: clock.wall, lambda: clock.cpu, lambda: other.cpu)
    clock.pass_(0.0, 1.0)  # nobody else computes
    with profiler.beside():  # both do, on two cores
        clock.pass_(1.0, 4.0)
        other.cpu += 5.0
    with profiler.beside():  # it waits for us half of the time
        clock.pass_(0.0, 2.0)
        other.cpu += 1.0
    row = profiler.row()
    assert (row["loop_s"], row["loop_beside_s"], row["waited_s"]) == (7.0, 6.0, 1.0)


def test_another_thread_reads_what_this_one_computed() -> None:
    clock, told = clock_of_this_thread(), list[float]()
    sum(range(100_000))
    before = clock()
    thread = threading.Thread(target=lambda: told.append(clock()))
    thread.start()
    thread.join()
    assert 0 < before <= told[0] <= clock()


def test_a_clock_that_counts_too_much_takes_no_more_than_there_was(clock: Clock, profiler: Profiler) -> None:
    clock.wall, clock.cpu = 1.0, 1.5
    row = profiler.row()
    assert (row["wall_s"], row["loop_s"], row["alone_s"]) == (1.0, 1.0, 0.0)


def test_a_failure_inside_leaves_nobody_at_work(clock: Clock, profiler: Profiler) -> None:
    with pytest.raises(ValueError, match="x"), profiler.inside("model"):
        raise ValueError("x")
    clock.pass_(3.0)
    assert profiler.row()["alone_s"] == 3.0


def test_a_resumed_run_adds_to_its_profile(tmp_path: Path, clock: Clock, profiler: Profiler) -> None:
    with profiler.inside("model"):
        clock.pass_(3.0, 1.0)
    path = tmp_path / "profile.json"
    write_profile(path, profiler.row())
    whole = write_profile(path, profiler.row())
    assert (whole["wall_s"], whole["model_s"], whole["model_share"], whole["ours_share"]) == (8.0, 6.0, 0.75, 0.25)
    assert json.loads(path.read_text()) == whole
    assert describe_profile(whole) == "8 s: model 75.0%, sandbox 0.0%, learner 0.0%, ours 25.0%"
    del whole["loop_beside_s"], whole["waited_s"]  # which earlier versions did not write
    path.write_text(json.dumps(whole))
    assert write_profile(path, profiler.row())["wall_s"] == 12.0
    path.write_text("[]")
    with pytest.raises(RunError, match="is no profile"):
        write_profile(path, profiler.row())


def test_watched_parts_do_what_they_did(profiler: Profiler) -> None:
    lake_suite = FrozenLakeSuite(FrozenLakeTasks(kind="frozenlake", train=4, heldout=1))

    async def attempt() -> tuple[str, str]:
        renderer = ByteRenderer()
        policy = ProfiledPolicy(ScriptedPolicy(renderer, lambda name: iter(["up", "down"])), profiler)
        suite = ProfiledSuite(lake_suite, profiler)
        task = suite.split("train")[0]
        env: Environment = suite.open(task, seed=0)
        async with policy.cohort(["a"]):
            opening = await env.start()
            sampling = Sampling(99, 1.0, renderer.stop_tokens, 0)
            turn = await policy.generate("a", renderer.opening(opening), sampling, timeout_s=9.0)
            outcome = await env.act(renderer.decode(turn.tokens), timeout_s=9.0)
            await env.finish()
            await env.close()
            await policy.release("a")
        assert (suite.tools(), suite.describe(task)) == (lake_suite.tools(), lake_suite.describe(task))
        assert next(suite.corpus()) == next(lake_suite.corpus())
        assert next(iter(suite.reference(task, seed=0) or ())) == next(iter(lake_suite.reference(task, seed=0) or ()))
        return renderer.decode(turn.tokens), outcome.observation

    said, seen = asyncio.run(attempt())
    assert said == "up"
    assert seen
