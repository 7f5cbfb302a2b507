"""Groups in flight: what is cut keeps what it had, a dead part stops the run, and the ledger refuses nonsense."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepswe.config import AgentConfig, AsynchronyConfig, RolloutConfig
from deepswe.errors import RunError, StoreError
from deepswe.policy.base import Completion
from deepswe.policy.scripted import ByteRenderer, ScriptedPolicy
from deepswe.rollout.agent import run_attempt, was_cut
from deepswe.rollout.attempt import Attempt, Cut
from deepswe.rollout.flow import Flow
from deepswe.rollout.flow_groups import FlowPlan
from deepswe.rollout.group import Group
from deepswe.rollout.ledger import Ledger
from deepswe.rollout.scheduler import Scheduler
from deepswe.rollout.slots import Slots
from deepswe.rollout.store import TrajectoryStore
from deepswe.simulate.clock import run_virtual
from deepswe.types import Ending, Ungraded
from tests.unit.rollout.guessing import Guessing, GuessingSuite, Number

TASKS = tuple(Number(f"t{n}") for n in range(8))


def policy() -> ScriptedPolicy:
    return ScriptedPolicy(ByteRenderer(), lambda name: iter(["1", "7"]))


class Slow(GuessingSuite):
    """Attempts at `slow` tasks take an hour a turn."""

    slow: Sequence[str] = ()

    def open(self, task: Number, *, seed: int) -> Any:
        env = super().open(task, seed=seed)
        assert isinstance(env, Guessing)
        env.slow_s = 60.0 if task.id in self.slow else 1.0
        return env


def flow(path: Path, suite: GuessingSuite, *, steps: int = 3, **asynchrony: Any) -> Flow:
    scheduler = Scheduler(
        suite, policy(), ByteRenderer(), rollout=RolloutConfig(), agent=AgentConfig(), concurrency=4, seed=1
    )
    store = TrajectoryStore(path)
    return Flow(
        scheduler,
        store,
        Ledger(store.directory / "ledger.jsonl"),
        plan=FlowPlan("train", steps, 2, 2, 1.0, frozenset({Ending.ERROR})),
        config=AsynchronyConfig(**asynchrony),
        draw=lambda step: TASKS[2 * step : 2 * step + 2],
    )


async def batches(made: Flow, count: int) -> list[tuple[Group, ...]]:
    async with made.running():
        return [await made.batch(step) for step in range(count)]


def test_a_cut_attempt_keeps_its_turns_and_has_no_reward() -> None:
    async def run() -> None:
        cut = Cut()
        attempt = Attempt("t0", 0, "train", 0, 1, 1.0)
        env = Guessing(Number("t0"), slow_s=50.0)
        asyncio.get_running_loop().call_later(70.0, cut, "too slow")
        done = await run_attempt(
            env, policy(), ByteRenderer(), attempt, rollout=RolloutConfig(), agent=AgentConfig(), cut=cut
        )
        assert (done.ending, done.grade) == (Ending.ENV_TIMEOUT, Ungraded("cut: too slow", "rollout.cut"))
        assert was_cut(done)
        assert len(done.steps) == 1
        assert env.log == ["start", "act 1", "act 7", "close"]
        assert done.wall_s == pytest.approx(70.0)

    run_virtual(run())


def test_a_turn_under_two_versions_is_two_spans() -> None:
    done = Completion((1, 2, 3), (-1.0, -2.0, -3.0), "stop", 4, later=((2, 5),))
    assert done.by_version() == (((1, 2), (-1.0, -2.0), 4), ((3,), (-3.0,), 5))


def test_slow_groups_do_not_hold_up_a_step_until_they_would_be_too_old(tmp_path: Path) -> None:
    suite = Slow(TASKS)
    suite.slow = ("t0",)
    taken = run_virtual(batches(flow(tmp_path, suite, steps=3, max_age=2), 3))
    assert [[group.task_id for group in batch] for batch in taken] == [["t1", "t2"], ["t3", "t4"], ["t0", "t5"]]


def test_a_quorum_lets_a_group_go_without_its_straggler(tmp_path: Path) -> None:
    class OneSlow(GuessingSuite):
        def open(self, task: Number, *, seed: int) -> Any:
            env = super().open(task, seed=seed)
            assert isinstance(env, Guessing)
            env.slow_s = 80.0 if len(self.opened) == 1 else 1.0
            return env

    taken = run_virtual(batches(flow(tmp_path, OneSlow(TASKS), steps=1, quorum=0.5), 1))
    assert [sum(was_cut(t) for t in group.trajectories) for group in taken[0]] == [1, 0]


def test_failures_alone_stop_the_run_with_the_first_of_them(tmp_path: Path) -> None:
    suite = GuessingSuite(TASKS, fails={task.id: ["start"] * 100 for task in TASKS})
    with pytest.raises(RunError, match="died in start"):
        run_virtual(batches(flow(tmp_path, suite, max_age=1), 1))


def test_a_bug_in_one_attempt_ends_all_and_is_raised_as_itself(tmp_path: Path) -> None:
    class Broken(GuessingSuite):
        def describe(self, task: Number) -> Any:
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        run_virtual(batches(flow(tmp_path, Broken(TASKS), max_age=1), 1))


def test_the_ledger_survives_a_torn_line_and_refuses_to_settle_twice(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.open_group(0, 0)
    ledger.open_group(1, 0)
    ledger.train(0, [0])
    path.write_bytes(path.read_bytes() + b'{"kind": "trai')
    again = Ledger(path)
    assert (again.opened, again.trained, again.settled(1)) == ({0: 0, 1: 0}, {0: (0,)}, False)
    with pytest.raises(ValueError, match="settled before"):
        again.drop(1, [0], "twice")
    path.write_text('{"kind": "trained", "step": 0, "groups": [5]}\n')
    with pytest.raises(StoreError, match="never opened"):
        Ledger(path)


def test_who_waits_for_a_place_comes_before_who_tries() -> None:
    async def run() -> None:
        slots, order = Slots(1), []

        async def evaluation() -> None:
            async with slots.held():
                order.append("held")

        assert slots.try_take()
        waiting = asyncio.create_task(evaluation())
        await asyncio.sleep(0)
        assert not slots.try_take()
        slots.on_free = lambda: order.append("free")
        slots.give()
        await waiting
        assert (order, slots.taken) == (["held", "free"], 0)

    asyncio.run(run())
