"""The simulator runs in virtual time, sees what waits, and names the part to have more of."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepswe.cli.app import build_app
from deepswe.config import build_recipe
from deepswe.errors import ConfigError, RunError
from deepswe.rollout.store import TrajectoryStore
from deepswe.simulate.clock import run_virtual
from deepswe.simulate.profile import DrawnLives, Life, Profile, Spread, Turn, life_of, load_profile
from deepswe.simulate.record import read_recorded
from deepswe.simulate.run import simulate
from deepswe.training.run import write_json
from deepswe.types import Ending, Graded, Step, TokenSpan, Trajectory
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
    lives = read_recorded(tmp_path / "first").lives
    known = {len(t.steps) for t in TrajectoryStore(tmp_path / "first").read("train")}
    assert {len(lives.of(seed).turns) for seed in range(20)} <= known
    again = simulate(recipe(4), PROFILE, make(tmp_path / "second"), lives=lives)
    assert again.steps_per_hour > 0
    with pytest.raises(ConfigError, match="holds no trajectories"):
        read_recorded(tmp_path)


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


def spans(*lengths: int) -> tuple[TokenSpan, ...]:
    """Negative lengths are sampled."""
    return tuple(TokenSpan((0,) * abs(n), n < 0, (0.0,) * max(0, -n)) for n in lengths)


def attempt(number: int, *lengths: int, starts: tuple[int, ...] = (), turns: int = 2) -> Trajectory:
    return Trajectory(
        task_id="t",
        attempt=number,
        phase="train",
        step=0,
        spans=spans(*lengths),
        steps=(Step("", None, "", generation_s=2.0, environment_s=1.0),) * turns,
        ending=Ending.SUBMITTED,
        grade=Graded(1.0),
        wall_s=10.0,
        starts=starts,
    )


def test_a_recorded_attempt_has_its_prompt_its_turns_and_what_they_were_answered() -> None:
    turns = (Turn(30, 1.0, 20), Turn(40, 1.0, 0))
    assert life_of(attempt(0, 100, -30, 20, -40, 5)) == Life(100, turns, 2.0, 2.0, 1.0)
    # a turn that two versions sampled is one turn
    assert life_of(attempt(0, 100, -10, -20, 20, -40)).turns == turns
    # the second sequence begins with the whole context, 25 tokens shorter than what was there before
    assert life_of(attempt(0, 100, -30, 125, -40, starts=(2,))).turns == (Turn(30, 1.0, 0), Turn(40, 1.0, 0))


def write_run(directory: Path, *, rows: str, backend: str = "embedded") -> Path:
    segment, _ = TrajectoryStore(directory).begin("train", 0, keep=False)
    with segment:
        for number in range(2):
            segment.append(attempt(number, 100, -30, 20, -40))
        segment.commit()
    tree = recipe(1, groups=2, attempts=2).model_dump(mode="json")
    write_json(directory / "recipe.json", {**tree, "engine": {**tree["engine"], "backend": backend}})
    (directory / "metrics.jsonl").write_text(rows)
    return directory


ROW = (
    '{"kind": "train", "step": 1, "length_mean": 190.0, "ending/submitted": 2, "rollout_s": 10.0, "learner_s": 4.0, '
    '"seconds": 15.0}\n'
)


def test_the_speeds_of_a_recorded_run_are_its_own(tmp_path: Path) -> None:
    found = read_recorded(write_run(make(tmp_path / "run"), rows=ROW))
    profile = found.profile
    assert profile.request_tokens_per_s == 140 / 8  # tokens of both attempts in the seconds of their four turns
    assert profile.decode_tokens_per_s == pytest.approx(4 * 0.4 * 140 / 8)  # four at once, 4 s of 10 being sampled
    assert profile.train_tokens_per_s == 2 * 190 / 4.0
    assert (profile.publish_s, profile.train_fixed_s, profile.gpus, profile.learner_gpus) == (1.0, 0.0, 1, 0)
    assert profile.unit == 4  # turns of 35 tokens
    assert "sampling (17.5 tokens/s a request, 28 in all), learner (4 s a step)" in found.text
    assert "assumed: start and grading share" in found.text
    apart = read_recorded(write_run(make(tmp_path / "apart"), rows=ROW, backend="vllm")).profile
    assert (apart.gpus, apart.learner_gpus) == (2, 1)


def test_speeds_that_are_not_recorded_or_are_given_are_said_to_be_assumed(tmp_path: Path) -> None:
    bare = read_recorded(write_run(make(tmp_path / "bare"), rows=""))
    assert bare.profile == Profile(unit=4)
    assert "speeds are those of 64 H100 and 32B" in bare.text
    given = read_recorded(write_run(make(tmp_path / "given"), rows=ROW), PROFILE)
    assert given.profile == PROFILE.model_copy(update={"unit": 4})
    assert "speeds are those of the profile" in given.text


def test_a_simulation_like_a_run_goes_about_as_fast_as_the_run(tmp_path: Path) -> None:
    wanted, profile = recipe(16, groups=4), PROFILE.model_copy(update={"learner_gpus": 0})
    first = simulate(wanted, profile, make(tmp_path / "first"))
    write_json(tmp_path / "first" / "recipe.json", wanted.model_dump(mode="json"))
    recorded = read_recorded(tmp_path / "first")
    again = simulate(wanted, recorded.profile, make(tmp_path / "again"), lives=recorded.lives)
    assert again.steps_per_hour == pytest.approx(first.steps_per_hour, rel=0.2)
    assert again.learner == pytest.approx(first.learner, rel=0.5)


def test_steps_that_warm_up_or_end_the_run_are_told_and_no_ages_are_no_line(tmp_path: Path) -> None:
    found = simulate(recipe(16, max_age=3), PROFILE, make(tmp_path / "run"))
    assert (found.before, found.steps, found.after) == (4, 8, 4)
    assert "not counted: 4 before them to warm up, 4 after them that end it" in found.text()
    assert "age of attempts" in found.text()
    assert "age of attempts" not in replace(found, ages={}).text()


def test_a_run_without_steps_or_without_end_is_refused(tmp_path: Path) -> None:
    for steps in (0, 10**9):
        with pytest.raises(ConfigError, match=r"training\.steps is .* can be simulated"):
            simulate(recipe(steps), PROFILE, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "steps"), [([], 24), (["--steps", "8"], 8), (["training.steps=12"], 12), (["training.steps=1"], 1)]
)
def test_the_command_simulates_as_many_steps_as_it_is_told(arguments: list[str], steps: int, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[run]\nname = "r"\n[tasks]\nkind = "micro"\n[rollout]\ntasks_per_step = 1\ngroup_size = 2\n')
    shown = CliRunner().invoke(build_app(), ["simulate", str(path), *arguments, "--json"])
    assert shown.exit_code == 0, shown.output
    made = json.loads(shown.stdout)
    assert made["before"] + made["steps"] + made["after"] == steps
