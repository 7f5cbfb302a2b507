"""`deepswe eval --policy endpoint` against an endpoint with faults, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.endpoint_server.faults import Faults
from tests.endpoint_server.server import KEY, Endpoint, serve
from tests.endpoint_server.solver import Solver

from deepswe.algorithms.packing import make_samples
from deepswe.config import EndpointConfig, MicroTasks, Recipe, build_recipe
from deepswe.errors import ConfigError, EndpointRefused, RunError, TrainingError
from deepswe.evaluation.results import open_evaluation
from deepswe.progress import Silent
from deepswe.session.cassette_play import play
from deepswe.session.evaluate import Evaluation, Plan, run_evaluation
from deepswe.session.evaluate_remote import endpoint_actor, spent

MICRO = MicroTasks(train=1, heldout=2, unseen=0)


@contextmanager
def served(endpoint: Endpoint) -> Iterator[str]:
    """The endpoint on a thread with a loop of its own, as `run_evaluation` has one of its own, too."""
    ready: list[str] = []
    started, loop = threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def run() -> None:
        async with serve(endpoint) as url:
            ready.append(url)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    started.wait(30)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


def recipe_of(tmp_path: Path, url: str, *, native: bool = True, **endpoint: Any) -> Recipe:
    tree = {
        "run": {"name": "run", "directory": str(tmp_path)},
        "tasks": {"kind": "micro", **MICRO.model_dump(exclude={"kind"})},
        "agent": {"format": "native" if native else "xml"},
        "rollout": {"max_retries": 0},
        "endpoint": {
            "url": url, "model": "solver", "key_env": "EVAL_TEST_KEY", "backoff_s": 0.01, "idle_s": 2.0,
            "dollars_in": 1.0, "dollars_out": 2.0, **endpoint,
        },
    }  # fmt: skip
    return build_recipe(tree, origin="test")


def evaluate(recipe: Recipe, **options: Any) -> Evaluation:
    actor = endpoint_actor(recipe.endpoint)
    return run_evaluation(recipe, Plan("heldout", attempts=2), actor, resume=True, progress=Silent(), **options)


@pytest.mark.parametrize("style", ["openai", "anthropic"])
def test_attempts_pass_and_fail_in_spite_of_faults_and_every_token_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    monkeypatch.setenv("EVAL_TEST_KEY", KEY)
    endpoint = Endpoint(Solver(MICRO), Faults(0.3, 0.2), slow_s=5.0)
    tape = tmp_path / "tape.jsonl"
    with served(endpoint) as url:
        done = evaluate(recipe_of(tmp_path, url, native=style == "openai", style=style), tape=tape)
    assert done.table["attempts"] == {"planned": 4, "made": 4, "graded": 4}
    assert sum(endpoint.faults.met.values()) > 0
    trajectories = open_evaluation(str(done.run)).trajectories
    honest = [turn for t in trajectories for turn in t.usage if not turn.estimated]
    if style == "openai":  # the other format has no seed, so that equal conversations are one to the server
        counted = [counts for key, counts in endpoint.true.items() if key not in endpoint.lied]
        assert sum(turn.prompt for turn in honest) == sum(prompt for prompt, _ in counted)
        assert sum(turn.completion for turn in honest) == sum(completion for _, completion in counted)
    dollars = sum(turn.dollars for t in trajectories for turn in t.usage)
    assert done.spent == pytest.approx(dollars)
    assert spent(done.run / "requests.jsonl", done.phase + "/") == pytest.approx(dollars)
    everything = b"".join(path.read_bytes() for path in (*done.run.rglob("*.json*"), tape))
    assert KEY.encode() not in everything
    with pytest.raises(TrainingError, match="remote endpoint"):
        make_samples(trajectories[0])
    played = play(tape)
    assert (len(played.trajectories), played.different) == (4, ())


def test_a_wrong_key_ends_the_evaluation_early_and_a_missing_one_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVAL_TEST_KEY", "wrong")
    endpoint = Endpoint(Solver(MICRO), Faults())
    with served(endpoint) as url, pytest.raises((EndpointRefused, RunError), match="401"):
        evaluate(recipe_of(tmp_path, url))
    assert len(endpoint.bodies) <= 4
    monkeypatch.delenv("EVAL_TEST_KEY")
    with pytest.raises(ConfigError, match="EVAL_TEST_KEY, which is not set"):
        endpoint_actor(EndpointConfig(url="http://localhost", model="m", key_env="EVAL_TEST_KEY"))
    with pytest.raises(ConfigError, match=r"endpoint\.model is empty"):
        endpoint_actor(EndpointConfig(url="http://localhost"))


def test_a_budget_of_dollars_stops_before_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_TEST_KEY", KEY)
    with served(Endpoint(Solver(MICRO), Faults())) as url:
        recipe = recipe_of(tmp_path, url, dollars_out=1000.0)
        actor = endpoint_actor(recipe.endpoint)
        plan = Plan("heldout", attempts=2, concurrency=1, max_dollars=0.001)
        done = run_evaluation(recipe, plan, actor, resume=True, progress=Silent())
    assert done.table["attempts"]["made"] == 1
    assert "dollars is spent" in done.stopped
    assert json.loads((done.run / "evaluations.json").read_text())[done.phase]["stopped"] == done.stopped
