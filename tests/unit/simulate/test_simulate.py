"""The simulator runs in virtual time, sees what waits, and names the part to have more of."""

import asyncio
from pathlib import Path

import pytest

from deepswe.config import build_recipe
from deepswe.errors import ConfigError, RunError
from deepswe.rollout.store import TrajectoryStore
from deepswe.simulate.clock import run_virtual
from deepswe.simulate.profile import DrawnLives, Profile, Spread, load_profile, recorded_lives
from deepswe.simulate.run import simulate
from tests.unit.simulate.killing import PROFILE, recipe


def test_virtual_hours_take_no_time_and_add_up() -> None:
    async def wait() -> float:
        await asyncio.gather(*(asyncio.sleep(3600.0 * n) for n in range(5)))
        return asyncio.get_running_loop().time()

    assert run_virtual(wait()) == pytest.approx(4 * 3600.0)


def test_what_would_hang_is_an_error() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RunError, match="this would hang"):
        run_virtual(hang())


def test_steps_ahead_are_faster_where_some_attempts_are_slow(tmp_path: Path) -> None:
    slow = PROFILE.model_copy(update={"tool_s": Spread(median=5.0, sigma=2.0, most=80.0)})
    waiting = simulate(recipe(8), slow.model_copy(update={"learner_gpus": 0}), make(tmp_path / "sync"))
    flowing = simulate(recipe(8, max_age=3), slow, make(tmp_path / "async"))
    assert flowing.steps_per_hour > 1.2 * waiting.steps_per_hour
    assert set(waiting.ages) == {0}
    assert max(flowing.ages) <= 3
    assert waiting.bottleneck.startswith("waiting")


def test_too_few_sandboxes_are_the_bottleneck_and_bound_what_is_in_flight(tmp_path: Path) -> None:
    few = recipe(8, max_age=3)
    few = few.model_copy(update={"sandbox": few.sandbox.model_copy(update={"concurrency": 2})})
    found = simulate(few, PROFILE.model_copy(update={"train_fixed_s": 0.0}), make(tmp_path / "few"))
    assert found.sandboxes > 0.9
    assert found.bottleneck.startswith("sandboxes")


def test_lives_of_a_recorded_run_are_used(tmp_path: Path) -> None:
    simulate(recipe(4), PROFILE, make(tmp_path / "first"))
    lives = recorded_lives(tmp_path / "first")
    known = {len(t.steps) for t in TrajectoryStore(tmp_path / "first").read("train")}
    assert {len(lives.of(seed).turns) for seed in range(20)} <= known
    again = simulate(recipe(4), PROFILE, make(tmp_path / "second"), lives=lives)
    assert again.steps_per_hour > 0
    with pytest.raises(ConfigError, match="holds no trajectories"):
        recorded_lives(tmp_path)


def test_the_same_seed_has_the_same_life_and_a_wrong_profile_is_refused(tmp_path: Path) -> None:
    assert DrawnLives(Profile()).of(7) == DrawnLives(Profile()).of(7) != DrawnLives(Profile()).of(8)
    path = tmp_path / "profile.toml"
    path.write_text("gpus = 0\n")
    with pytest.raises(ConfigError, match="gpus"):
        load_profile(path)
    path.write_text("gpus = 8\nlearner_gpus = 2\ntool_s = { median = 4.0 }\n")
    assert load_profile(path).tool_s.median == 4.0


def test_options_that_cannot_be_honoured_are_refused_at_load() -> None:
    base = {"run": {"name": "x"}, "tasks": {"kind": "micro"}}
    wrong = {
        "deterministic": {"run": {"name": "x", "deterministic": True}, "asynchrony": {"max_age": 1}},
        "resample_batches": {"algorithm": {"resample_batches": 1}, "asynchrony": {"quorum": 0.5}},
        "in_flight": {"asynchrony": {"in_flight": "abort"}},
        "top_p": {"engine": {"backend": "vllm", "vllm": {"top_p": 0.9}}},
        "top_k": {"engine": {"vllm": {"top_k": 0}}},
    }
    for name, tree in wrong.items():
        with pytest.raises(ConfigError, match=name):
            build_recipe({**base, **tree}, origin="test")


def make(directory: Path) -> Path:
    directory.mkdir()
    return directory
