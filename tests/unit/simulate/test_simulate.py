"""The simulator runs in virtual time, sees what waits, and names the part to have more of."""

import asyncio
import os
import signal
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("request_tokens_per_s = 1e-300", "request_tokens_per_s: .* greater than or equal to 1 "),
        ("gpus = 8\nlearner_gpus = 8", "learner_gpus 8 leaves none of 8 gpus to sample"),
        ("turns = {median = 1e6}", "turns.median is 1e\\+06; at most 10,000 can be simulated"),
        ("turns = {median = 10, sigma = 1e9, most = 100}", "turns.sigma: .* less than or equal to 10 "),
        ("observation_tokens = {median = 1e8}", "at most 10,000,000 can be simulated"),
        ("prompt_tokens = 1000000000000", "prompt_tokens: "),
        ("publish_s = -1", "publish_s: "),
    ],
)
def test_a_profile_that_would_not_end_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_profile(tmp_path / "p.toml")


def test_more_attempts_than_can_be_simulated_are_refused(tmp_path: Path) -> None:
    many = recipe(4)
    many = many.model_copy(update={"rollout": many.rollout.model_copy(update={"tasks_per_step": 10**9})})
    with pytest.raises(ConfigError, match="more than can be simulated"):
        simulate(many, PROFILE, tmp_path)


def test_the_shortest_lives_end(tmp_path: Path) -> None:
    least = Spread(median=1e-300)
    quick = {"turns": least, "turn_tokens": least, "tool_s": least, "start_s": least, "grade_s": least, "publish_s": 0}
    assert simulate(recipe(4), PROFILE.model_copy(update=quick), make(tmp_path / "least")).steps_per_hour > 0


def test_sigterm_ends_a_simulation_at_any_moment_without_a_traceback() -> None:
    closed: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10**9):
                await asyncio.sleep(1)
        finally:
            closed.append("work")

    with pytest.raises(KeyboardInterrupt):
        run_virtual(work())
    assert closed == ["work"]
