"""What the command line changes in a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepswe.config import BundledTasks, MicroTasks, TaskSetTasks, load_recipe
from deepswe.errors import ConfigError

MICRO = '[run]\nname = "r"\n[tasks]\nkind = "micro"\nheldout = 120\nunseen = 60\nseed = 3\n'
BUNDLED = '[run]\nname = "r"\n[tasks]\nkind = "bundled"\nrepositories = ["toolz"]\nlimit = 4\n'


def write(directory: Path, text: str) -> Path:
    (directory / "r.toml").write_text(text)
    return directory / "r.toml"


def test_another_kind_of_tasks_leaves_out_what_the_file_says_of_the_first(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MICRO), ["tasks.kind=taskset", "tasks.path=shop.jsonl"])
    assert recipe.tasks == TaskSetTasks(path=Path("shop.jsonl"), seed=3)
    recipe = load_recipe(write(tmp_path, BUNDLED), ["tasks.path=shop.jsonl", "tasks.kind=taskset", "tasks.limit=2"])
    assert recipe.tasks == TaskSetTasks(path=Path("shop.jsonl"), repositories=("toolz",), limit=2)


def test_what_the_command_line_says_of_the_new_kind_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.bundled\.unseen is not a known key"):
        load_recipe(write(tmp_path, MICRO), ["tasks.kind=bundled", "tasks.unseen=3"])
    with pytest.raises(ConfigError, match="other"):
        load_recipe(write(tmp_path, MICRO), ["tasks.kind=other"])


def test_the_same_kind_keeps_the_section(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MICRO), ["tasks.kind=micro", "tasks.unseen=7"])
    assert recipe.tasks == MicroTasks(heldout=120, unseen=7, seed=3)
    assert load_recipe(write(tmp_path, MICRO), ["tasks.kind=bundled"]).tasks == BundledTasks()
