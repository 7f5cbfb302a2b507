"""What a recipe says of its parts reaches them."""

from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(("asked", "width", "threads"), [(0, 32, 1), (0, 512, 4), (3, 32, 3)])
def test_the_engine_has_the_threads_of_the_recipe_or_those_it_makes_use_of(
    asked: int, width: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(
        "deepswe.session.parts.EmbeddedPolicy", lambda model, **options: given.append(options["threads"])
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    tasks = {"kind": "frozenlake", "train": 8, "heldout": 2, "max_size": 3}
    scratch = {**SMALL, "hidden_size": width, "intermediate_size": width}
    recipe = build_recipe(
        {"run": {"name": "r", "threads": asked}, "model": {"scratch": scratch}, "tasks": tasks}, origin="test"
    )
    parts = Parts(recipe, OpenSuite(FrozenLakeSuite(recipe.tasks), 8), TrajectoryStore(tmp_path), Silent())  # type: ignore[arg-type]
    parts.engine(parts.load_model())
    assert given == [threads]


@pytest.mark.parametrize(
    ("model", "engine", "narrow"),
    [
        ("float32", "", (False, False)),
        ("bfloat16", "", (True, True)),
        ("bfloat16", "float32", (True, False)),
        ("float32", "bfloat16", (False, True)),
    ],
)
def test_the_engine_samples_in_its_own_type_where_it_has_one(
    model: str, engine: str, narrow: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.dtype | None] = []
    monkeypatch.setattr(
        "deepswe.session.parts.EmbeddedPolicy", lambda model, **options: given.append(options["autocast"])
    )
    tasks = {"kind": "frozenlake", "train": 8, "heldout": 2, "max_size": 3}
    recipe = build_recipe(
        {
            "run": {"name": "r", "threads": 1},
            "model": {"scratch": SMALL, "dtype": model},
            "engine": {"dtype": engine},
            "tasks": tasks,
        },
        origin="test",
    )
    parts = Parts(recipe, OpenSuite(FrozenLakeSuite(recipe.tasks), 8), TrajectoryStore(tmp_path), Silent())  # type: ignore[arg-type]
    parts.engine(parts.load_model())
    assert (parts.autocast, given == [torch.bfloat16]) == narrow


@pytest.mark.parametrize(
    ("asked", "cores", "here", "threads"), [(0, 4, "1", 4), (0, 4, "2", 2), (0, 1, "2", 1), (3, 1, "2", 3)]
)
def test_threads_are_those_of_the_recipe_or_this_process_s_share_of_the_cores(
    asked: int, cores: int, here: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("deepswe.session.parts.usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    tasks = {"kind": "frozenlake", "train": 8, "heldout": 2, "max_size": 3}
    recipe = build_recipe(
        {"run": {"name": "r", "threads": asked}, "model": {"scratch": SMALL}, "tasks": tasks}, origin="test"
    )
    Parts(recipe, OpenSuite(FrozenLakeSuite(recipe.tasks), 8), TrajectoryStore(tmp_path), Silent())  # type: ignore[arg-type]
    assert chosen == [threads]
