"""What a recipe says of its parts reaches them."""

from pathlib import Path
from typing import Any

import pytest

from deepswe.config import build_recipe
from deepswe.envs.frozenlake import FrozenLakeSuite
from deepswe.envs.suites import OpenSuite
from deepswe.progress import Silent
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.parts import Parts

SMALL = {"hidden_size": 32, "layers": 1, "heads": 2, "key_value_heads": 1, "intermediate_size": 32, "vocabulary": 600}


@pytest.mark.parametrize(("engine", "cache_bytes"), [({}, 4 << 30), ({"cache_gib": 1.5}, 3 << 29)])
def test_the_engine_keeps_what_the_recipe_says(engine: dict[str, Any], cache_bytes: int, tmp_path: Path) -> None:
    tasks = {"kind": "frozenlake", "train": 8, "heldout": 2, "max_size": 3}
    recipe = build_recipe(
        {"run": {"name": "r", "threads": 1}, "model": {"scratch": SMALL}, "tasks": tasks, "engine": engine},
        origin="test",
    )
    opened = OpenSuite(FrozenLakeSuite(recipe.tasks), 8)  # type: ignore[arg-type]
    parts = Parts(recipe, opened, TrajectoryStore(tmp_path), Silent())
    with parts.engine(parts.load_model()) as policy:
        assert policy.cache_bytes == cache_bytes
