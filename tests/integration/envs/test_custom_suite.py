"""A suite of the user's own: the example of the documentation is run as it is written there."""

import json
import re
import sys
from pathlib import Path

import pytest

from deepswe.config import CustomTasks, load_recipe
from deepswe.envs.custom import load_suite
from deepswe.errors import ConfigError, EnvironmentFault
from deepswe.progress import Silent
from deepswe.session.rollouts import run_rollouts
from deepswe.session.train import train_recipe

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
SMALL = [
    *("model.scratch.hidden_size=32", "model.scratch.layers=1", "model.scratch.heads=2", "run.threads=1"),
    *("model.scratch.key_value_heads=1", "model.scratch.intermediate_size=32", "evaluation.attempts=1"),
]


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "guess.py").write_text(block("python"))
    (tmp_path / "guess.toml").write_text(block("toml"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    return tmp_path / "guess.toml"


def test_the_documented_suite_of_forty_lines_trains_and_its_reference_earns_every_reward(guess: Path) -> None:
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 45
    directory = f"run.directory={guess.parent / 'runs'}"
    run = train_recipe(load_recipe(guess, [*SMALL, directory]), progress=Silent())
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["tasks"]) == (2, 10)
    recipe = load_recipe(guess, [*SMALL, directory, "run.name=reference"])
    row = run_rollouts(recipe, actor="reference", split="heldout", attempts=1, limit=0, resume=False, progress=Silent())
    assert row["pass_at_1"] == 1.0


def test_a_suite_that_cannot_be_had_is_one_clear_error(guess: Path) -> None:
    for name, said in (
        ("nowhere:Suite", "nowhere cannot be imported"),
        ("guess:Nothing", "guess has no Nothing"),
        ("guess", "no entry point of deepswe.suites"),
        ("guess:GuessEnv", "gives no suite: it has no split"),
    ):
        options = {"task": None} if name.endswith("Env") else {}
        with pytest.raises(ConfigError, match=said):
            load_suite(CustomTasks(suite=name, options=options))
    with pytest.raises(EnvironmentFault, match="unexpected keyword argument 'size'"):
        load_suite(CustomTasks(suite="guess:GuessSuite", options={"size": 3}))
