"""The whole job with attempts ahead of the steps that train them, stopped in the middle and resumed."""

from collections import Counter
from pathlib import Path

import pytest

from deepswe.config import build_recipe
from deepswe.progress import Silent
from deepswe.rollout.ledger import Ledger
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.train import run_recipe
from deepswe.training.metrics import read_rows
from tests.integration.test_train import SMALL, Stopped, StopsAfter


def test_asynchronous_steps_over_the_embedded_engine_stopped_and_resumed(tmp_path: Path) -> None:
    recipe = build_recipe(
        {
            "run": {"name": "ahead", "directory": str(tmp_path), "threads": 1},
            "model": {"scratch": SMALL},
            "tasks": {"kind": "frozenlake", "train": 64, "heldout": 2, "max_size": 3, "observation": "relational"},
            "rollout": {
                "tasks_per_step": 2, "group_size": 2, "max_steps": 3, "max_tokens": 200, "max_turn_tokens": 3,
                "concurrency": 6,
            },
            "algorithm": {"endings": {"max_steps": {"train": True, "baseline": True}}},
            "training": {"steps": 5, "learning_rate": 1e-3, "checkpoint_every": 2},
            "evaluation": {"attempts": 1, "every": 2},
            "asynchrony": {"max_age": 2},
        },
        origin="test",
    )  # fmt: skip
    with pytest.raises((Stopped, BaseExceptionGroup)):
        run_recipe(recipe, resume=False, progress=StopsAfter(6))
    run_recipe(recipe, resume=True, progress=Silent())
    run = tmp_path / "ahead"
    ledger = Ledger(run / "trajectories" / "ledger.jsonl")
    trained = [number for step in range(5) for number in ledger.trained[step]]
    assert len(trained) == len(set(trained)) == 10
    keys = Counter(t.key for t in TrajectoryStore(run).read("train"))
    assert sum(keys.values()) == len(keys) == 2 * len(ledger.opened)
    rows = {row["step"]: row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "train"}
    assert sorted(rows) == [1, 2, 3, 4, 5]
    assert max(row["group_age_max"] for row in rows.values()) <= 2
    beside = [row for row in read_rows(run / "metrics.jsonl") if row.get("name") == "step"]
    assert [row["step"] for row in sorted(beside, key=lambda row: row["step"])] == [2, 4]
    assert all(row["version_low"] <= row["version_high"] for row in beside)
