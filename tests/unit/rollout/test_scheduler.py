"""Batches: every attempt once, infrastructure failures retried, killed batches taken up."""

import asyncio
from pathlib import Path

import pytest

from deepswe.config import AgentConfig, RolloutConfig
from deepswe.errors import RunError
from deepswe.policy.scripted import ByteRenderer, ScriptedPolicy
from deepswe.rollout.attempt import derive_seed
from deepswe.rollout.group import form_groups
from deepswe.rollout.scheduler import Batch, Scheduler, collect_recorded
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Trajectory
from tests.unit.rollout.guessing import GuessingSuite, Number

TASKS = (Number("a"), Number("b"), Number("c"))
BATCH = Batch("train", 4, TASKS, attempts=3, temperature=1.0)


def scheduler(suite: GuessingSuite, *, max_retries: int = 2, concurrency: int = 4) -> Scheduler:
    policy = ScriptedPolicy(ByteRenderer(), lambda name: iter(["7"]))
    rollout = RolloutConfig(max_retries=max_retries)
    return Scheduler(
        suite, policy, ByteRenderer(), rollout=rollout, agent=AgentConfig(), concurrency=concurrency, seed=5
    )


def test_every_attempt_is_made_once_in_the_order_of_the_plan() -> None:
    suite = GuessingSuite(TASKS)
    trajectories = asyncio.run(scheduler(suite).collect(BATCH))
    assert [(t.task_id, t.attempt) for t in trajectories] == [(task.id, n) for task in TASKS for n in range(3)]
    assert len(suite.opened) == 9
    assert len({t.seed for t in trajectories}) == 9


def test_an_infrastructure_failure_is_retried_and_counted() -> None:
    suite = GuessingSuite(TASKS, fails={"a": ["start", "grading"]})
    trajectories = asyncio.run(scheduler(suite, concurrency=1).collect(BATCH))
    assert [t.retries for t in trajectories] == [2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert all(t.reward == 1.0 for t in trajectories)


def test_after_the_last_retry_the_failure_is_recorded_without_a_reward() -> None:
    suite = GuessingSuite(TASKS, fails={"a": ["start"] * 2})
    trajectories = asyncio.run(scheduler(suite, max_retries=1, concurrency=1).collect(BATCH))
    assert [t.ending for t in trajectories[:2]] == [Ending.ERROR, Ending.SUBMITTED]
    assert trajectories[0].reward is None


def test_a_batch_that_only_fails_stops_the_run_and_quotes_the_failure() -> None:
    suite = GuessingSuite(TASKS, fails={task.id: ["start"] * 100 for task in TASKS})
    with pytest.raises(RunError, match="died in start"):
        asyncio.run(scheduler(suite).collect(BATCH))


def test_a_killed_batch_is_taken_up_and_a_committed_one_is_read_back(tmp_path: Path) -> None:
    suite, store = GuessingSuite(TASKS), TrajectoryStore(tmp_path)
    first = asyncio.run(scheduler(suite).collect(BATCH))
    with store.begin("train", 4, keep=True)[0] as segment:
        for trajectory in first[:5]:
            segment.append(trajectory)
    seen: list[Trajectory] = []
    whole = asyncio.run(collect_recorded(scheduler(suite), store, BATCH, keep=True, on_done=seen.append))
    assert len(suite.opened) == 9 + 4
    assert [t.key for t in whole] == [t.key for t in first]
    assert len(seen) == 9
    again = asyncio.run(collect_recorded(scheduler(suite), store, BATCH, keep=True))
    assert again == whole
    assert len(suite.opened) == 9 + 4


def test_after_an_outage_the_batch_goes_on_with_the_attempts_that_failed(tmp_path: Path) -> None:
    suite, store = GuessingSuite(TASKS, fails={task.id: ["start"] * 9 for task in TASKS}), TrajectoryStore(tmp_path)
    with pytest.raises(RunError, match="died in start"):
        asyncio.run(collect_recorded(scheduler(suite), store, BATCH, keep=True))
    whole = asyncio.run(collect_recorded(scheduler(GuessingSuite(TASKS)), store, BATCH, keep=True))
    assert [t.ending for t in whole] == [Ending.SUBMITTED] * 9
    assert store.committed("train", 4) == whole
    assert len(list((tmp_path / "trajectories" / "abandoned").iterdir())) == 1


def test_a_seed_depends_on_every_part_and_on_nothing_else() -> None:
    assert derive_seed(1, "train", 2, "a", 3) == derive_seed(1, "train", 2, "a", 3)
    assert len({derive_seed(1, "a", 23), derive_seed(1, "a2", 3), derive_seed(12, "a", 3), derive_seed(1, "a", 3)}) == 4
    assert 0 <= derive_seed("x") < 2**62


def test_groups_keep_attempts_together_and_refuse_a_double() -> None:
    trajectories = asyncio.run(scheduler(GuessingSuite(TASKS)).collect(BATCH))
    groups = form_groups(reversed(trajectories))
    assert [group.task_id for group in groups] == ["a", "b", "c"]
    assert [t.attempt for t in groups[0].trajectories] == [0, 1, 2]
    assert groups[0].rewards == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="twice"):
        form_groups([trajectories[0], trajectories[0]])
