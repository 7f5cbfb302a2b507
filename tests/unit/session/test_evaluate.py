"""`deepswe eval` on puzzles, which need no sandbox: what is kept, what is made, what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepswe.config import EndpointConfig, Recipe, build_recipe
from deepswe.errors import ConfigError, PolicyError, RunError, StoreError
from deepswe.evaluation.evaluations import config_hash, read_manifest
from deepswe.evaluation.results import load_results, open_evaluation
from deepswe.policy.base import Policy, Renderer
from deepswe.policy.scripted import ByteRenderer, ScriptedPolicy
from deepswe.progress import Silent
from deepswe.rollout.frames import read_frames
from deepswe.rollout.reference import SUBMIT
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.cassette_play import load_tape, play
from deepswe.session.evaluate import (
    Actor,
    Evaluation,
    Plan,
    Stage,
    Tally,
    noop_actor,
    reference_actor,
    run_evaluation,
)
from deepswe.session.evaluate_remote import endpoint_actor, spent
from deepswe.session.evaluate_sweep import run_sweep
from deepswe.tools.calls import render_call
from deepswe.tools.catalog import TOOLS
from deepswe.types import Ending

PLAN = Plan("heldout", attempts=2)


def lake(tmp_path: Path, **overrides: Any) -> Recipe:
    tree = {
        "run": {"name": "lake", "directory": str(tmp_path)},
        "tasks": {"kind": "frozenlake", "train": 1, "heldout": 4, "max_size": 4},
        "rollout": {"max_steps": 10, **overrides},
    }
    return build_recipe(tree, origin="test")


def walker(*, fails: int = 0, solves: int = 2) -> Actor:
    """Solves the first `solves` of the tasks; `fails` tries end in a failure of the engine first."""
    left = [fails]

    @asynccontextmanager
    async def act(stage: Stage) -> AsyncIterator[tuple[Policy, Renderer]]:
        suite = stage.opened.suite
        plan = {attempt.name: (number, task) for number, (task, attempt) in enumerate(stage.batch.plan(0))}

        def script(name: str) -> Iterator[str]:
            if left[0] > 0:
                left[0] -= 1
                raise PolicyError("the engine is away")
            number, task = plan[name.partition("~")[0]]
            if number // stage.batch.attempts < solves:
                moves = deque(suite.reference(task, seed=0) or ())
                while moves:
                    yield moves.popleft()
            while True:
                yield "hm"

        yield ScriptedPolicy(ByteRenderer(), script), ByteRenderer()

    return Actor("walker", {"kind": "walker", "solves": solves}, False, act)


def evaluate(recipe: Recipe, plan: Plan = PLAN, actor: Actor | None = None, **options: Any) -> Evaluation:
    return run_evaluation(recipe, plan, actor or walker(), resume=True, progress=Silent(), **options)


def test_a_table_has_scores_spread_endings_and_what_was_used(tmp_path: Path) -> None:
    seen: list[int] = []
    done = evaluate(lake(tmp_path), watch=lambda tally: seen.append(len(tally.trajectories)))
    table = done.table
    assert table["attempts"] == {"planned": 8, "made": 8, "graded": 8}
    assert table["pass_at_1"]["mean"] == 0.5
    assert (table["pass_at_1"]["runs"], table["pass_at_1"]["standard_error"]) == (2, 0.0)
    assert table["pass_at_k"] == {"1": 0.5, "2": 0.5}
    assert table["endings"]["max_steps"] == 4
    assert table["used"]["steps"] == sum(len(t.steps) for t in open_evaluation(str(done.run)).trajectories)
    assert seen == list(range(1, 9))


def test_more_attempts_and_tasks_add_to_those_that_there_are(tmp_path: Path) -> None:
    evaluate(lake(tmp_path), Plan("heldout", attempts=1, limit=2))
    done = evaluate(lake(tmp_path), Plan("heldout", attempts=2))
    assert done.table["attempts"]["made"] == 8
    sizes = [len(list(TrajectoryStore(done.run).committed(done.phase, number) or ())) for number in (0, 1)]
    assert sizes == [2, 6]
    evaluate(lake(tmp_path), Plan("heldout", attempts=2))
    assert TrajectoryStore(done.run).segments() == ((done.phase, 0), (done.phase, 1))


def test_another_policy_or_budget_is_another_evaluation(tmp_path: Path) -> None:
    first = evaluate(lake(tmp_path))
    second = evaluate(lake(tmp_path), actor=walker(solves=4))
    assert first.phase != second.phase
    assert second.table["pass_at_1"]["mean"] == 1.0
    assert set(read_manifest(first.run)) == {first.phase, second.phase}
    with pytest.raises(ConfigError, match="name one"):
        load_results(str(first.run))
    assert load_results(f"{first.run}:{second.phase}").total == 4
    recipe = lake(tmp_path)
    assert config_hash(recipe, {}) != config_hash(lake(tmp_path, max_steps=9), {})
    assert config_hash(recipe, {}) == config_hash(lake(tmp_path, concurrency=3), {})


def test_a_killed_evaluation_goes_on_and_gives_the_same_table(tmp_path: Path) -> None:
    whole = evaluate(lake(tmp_path / "a"))
    done = evaluate(lake(tmp_path / "b"))
    committed = done.run / "trajectories" / f"{done.phase}-000000.zst"
    with committed.open("rb") as file:
        records = [frame.data for frame in read_frames(file)]
    committed.unlink()
    partial = done.run / "trajectories" / f"{done.phase}-000000.partial.zst"
    partial.write_bytes(b"".join(records[:3]) + records[3][:50])
    tallies: list[Tally] = []
    again = evaluate(lake(tmp_path / "b"), watch=tallies.append)
    assert tallies[0].known == 3
    assert again.table == whole.table


def test_a_failure_of_the_engine_is_tried_again_and_never_scored(tmp_path: Path) -> None:
    done = evaluate(lake(tmp_path / "a", concurrency=1), actor=walker(fails=2))
    assert done.table["attempts"]["graded"] == 8
    assert [t.retries for t in open_evaluation(str(done.run)).trajectories][:1] == [2]
    recipe = lake(tmp_path / "b", concurrency=1, max_retries=0)
    failed = evaluate(recipe, actor=walker(fails=1))
    assert failed.table["attempts"] == {"planned": 8, "made": 8, "graded": 7}
    assert failed.table["endings"]["error"] == 1
    healed = evaluate(recipe)
    assert healed.table["attempts"]["graded"] == 8
    held = open_evaluation(str(healed.run)).trajectories
    assert all(t.ending is not Ending.ERROR for t in held)
    with pytest.raises(RunError, match="the engine is away"):
        evaluate(lake(tmp_path / "c", max_retries=0), actor=walker(fails=100))


def test_a_spent_budget_begins_no_attempt_and_says_so(tmp_path: Path) -> None:
    recipe = lake(tmp_path, concurrency=1)
    done = evaluate(recipe, replace(PLAN, max_wall_s=1e-9))
    assert "seconds" in done.stopped
    assert done.table["attempts"] == {"planned": 8, "made": 0, "graded": 0}
    assert evaluate(recipe).table["attempts"]["graded"] == 8


def test_what_ends_all_attempts_is_raised_as_itself(tmp_path: Path) -> None:
    def full(tally: Tally) -> None:
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="the disk is full"):
        evaluate(lake(tmp_path), watch=full)
    assert evaluate(lake(tmp_path)).table["attempts"]["graded"] == 8


def test_the_reference_solver_needs_no_recipe_of_its_own(tmp_path: Path) -> None:
    assert evaluate(lake(tmp_path), actor=reference_actor()).table["pass_at_1"]["mean"] == 1.0
    with pytest.raises(ConfigError, match="no tasks of the split 'moon'; it has train, heldout; give --split heldout"):
        evaluate(lake(tmp_path), Plan("moon", attempts=1))


def test_no_limit_on_tokens_cuts_a_turn_of_a_script(tmp_path: Path) -> None:
    recipe = lake(tmp_path, max_steps=1, max_turn_tokens=1)
    done = evaluate(recipe, Plan("heldout", attempts=1, limit=1), noop_actor())
    (turn,) = open_evaluation(f"{done.run}:{done.phase}").trajectories[0].steps
    assert turn.completion == render_call(SUBMIT, recipe.agent.format, TOOLS)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("policy", "x", "no policy.name"),
        ("policy", {"name": 5, "kind": "model"}, "policy.name is a int"),
        ("budget", None, "budget is a NoneType"),
        ("attempts", "2", "attempts is a str"),
    ],
)
def test_a_list_of_evaluations_with_a_wrong_value_is_refused_whole(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    done = evaluate(lake(tmp_path), Plan("heldout", attempts=1, limit=1))
    manifest = read_manifest(done.run)
    manifest[done.phase][key] = value
    (done.run / "evaluations.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=said):
        open_evaluation(str(done.run))


def test_a_sweep_cuts_recorded_attempts_and_refuses_what_they_do_not_say(tmp_path: Path) -> None:
    done = evaluate(lake(tmp_path), actor=walker(solves=4))
    longest = max(len(t.steps) for t in open_evaluation(str(done.run)).trajectories)
    points = run_sweep(str(done.run), "steps", [longest, longest - 1, 1], rerun=None, progress=Silent())
    assert [point.kept + point.replayed for point in points] == [8, 8, 8]
    assert points[0].replayed == 0
    assert points[0].estimate.mean == 1.0
    assert points[1].estimate.mean < 1.0
    assert [point.diverged for point in points] == [0, 0, 0]
    stuck = evaluate(lake(tmp_path), actor=walker(solves=2))
    spec = f"{stuck.run}:{stuck.phase}"
    with pytest.raises(ConfigError, match="--rerun"):
        run_sweep(spec, "steps", [20], rerun=None, progress=Silent())
    (again,) = run_sweep(spec, "steps", [20], rerun=lambda recipe: walker(solves=3), progress=Silent())
    assert (again.rerun, again.estimate.mean) == (8, 0.75)


def test_a_cassette_plays_the_same_trajectories_without_the_policy_and_tells_when_not(tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    evaluate(lake(tmp_path / "a", concurrency=1), actor=walker(fails=1), tape=tape)
    played = play(tape)
    assert (len(played.trajectories), played.different) == (8, ())
    assert sum(t.retries for t in played.trajectories) == 1
    rows = [json.loads(line) for line in tape.read_text().splitlines()]
    answers = [row for row in rows if row["kind"] == "environment" and "observation" in row.get("answer", {})]
    answer = next(row for row in answers if row["answer"]["observation"])
    answer["answer"]["observation"] += "!"
    tape.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    assert len(load_tape(tape).expected) == 8
    assert len(play(tape).different) >= 1
    with pytest.raises(ConfigError, match="recorded once"):
        evaluate(lake(tmp_path / "b"), tape=tape)
    (tmp_path / "none").write_text("{}\n")
    with pytest.raises(ConfigError, match="no cassette"):
        play(tmp_path / "none")


def test_a_cassette_of_a_models_own_tokens_needs_no_tokenizer(tmp_path: Path) -> None:
    class Shifted(ByteRenderer):
        """Stands for a renderer that cannot be made without its model."""

    class Own:
        stop_tokens = frozenset({260})

        def __getattr__(self, name: str) -> Any:
            return getattr(Shifted(), name)

    actor = walker()

    @asynccontextmanager
    async def act(stage: Stage) -> AsyncIterator[tuple[Policy, Renderer]]:
        async with actor.open(stage) as (policy, _):
            yield policy, Own()

    tape = tmp_path / "tape.jsonl"
    evaluate(lake(tmp_path), actor=replace(actor, open=act), tape=tape)
    assert not load_tape(tape).text
    assert play(tape).different == ()


def test_evaluation_imports_no_torch() -> None:
    heavy = ("torch", "numpy", "transformers", "matplotlib")
    code = (
        "import sys, deepswe.session.evaluate_remote, deepswe.session.cassette_play, deepswe.session.evaluate_sweep, "
        f"deepswe.cli.evaluate_live; print([name for name in {heavy} if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("header", {"temperature": "hot"}, "line 1.temperature is a str, not a float"),
        ("header", {"version": 9}, "of version 9"),
        ("turn", {"stream": 5}, "stream is a int"),
        ("trajectory", {"tags": 5}, "tags is a int"),
        ("trajectory", {"attempt": "x"}, "attempt is a str"),
        ("environment", {"kind": "house"}, "unknown kind 'house'"),
    ],
)
def test_a_cassette_with_a_wrong_line_is_refused_and_the_line_is_named(
    tmp_path: Path, kind: str, change: dict[str, object], said: str
) -> None:
    tape = tmp_path / "tape.jsonl"
    evaluate(lake(tmp_path), Plan("heldout", attempts=1, limit=1), tape=tape)
    rows = [json.loads(line) for line in tape.read_text().splitlines()]
    tape.write_text("".join(json.dumps(row | change if row["kind"] == kind else row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=said):
        play(tape)


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "ftp://host/v1", "http://", "http://host:99999/v1", "http://[/v1", "http://a b/v1"]
)
def test_what_is_no_address_is_refused_before_anything_waits_for_it(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        endpoint_actor(EndpointConfig(url=url, model="m"))


REQUEST = b'{"trajectory": "eval_heldout_1/a", "usage": {"dollars": 0.5}}\n'


def test_what_was_spent_is_the_sum_over_the_requests_of_a_phase(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    assert spent(path, "eval_heldout_1/") == 0.0
    other = REQUEST.replace(b"heldout_1", b"heldout_2")
    failed = b'{"trajectory": "eval_heldout_1/a", "usage": null}\n'
    path.write_bytes(REQUEST + other + b"\n" + failed + REQUEST + b'{"trajectory": "eval_he')
    assert spent(path, "eval_heldout_1/") == 1.0


@pytest.mark.parametrize(
    "line",
    [
        b"{broken",
        b"[" * 200_000,
        b"5",
        b"{}",
        b'{"trajectory": 5, "usage": null}',
        b'{"trajectory": "eval_heldout_1/a"}',
        b'{"trajectory": "eval_heldout_1/a", "usage": 5}',
        b'{"trajectory": "eval_heldout_1/a", "usage": {}}',
        b'{"trajectory": "eval_heldout_1/a", "usage": {"dollars": "1"}}',
        b'{"trajectory": "eval_heldout_1/a", "usage": {"dollars": true}}',
        b'{"trajectory": "eval_heldout_1/a", "usage": {"dollars": NaN}}',
        b'{"trajectory": "eval_heldout_1/a", "usage": {"dollars": Infinity}}',
        b'{"trajectory": "eval_heldout_1/a", "usage": {"dollars": -1}}',
    ],
    ids=range(13),
)
def test_a_damaged_request_is_named_and_never_counted_as_nothing(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(REQUEST + line + b"\n" + REQUEST)
    with pytest.raises(StoreError, match=r"requests\.jsonl:2 is no request .*take it out"):
        spent(path, "eval_heldout_1/")


@pytest.mark.parametrize("content", [b"", b'{"kind": "hea'])
def test_a_cassette_without_a_whole_line_is_told_as_such(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tape.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"is no cassette \(it has not one whole line\)"):
        load_tape(tmp_path / "tape.jsonl")
