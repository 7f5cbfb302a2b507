"""A run directory has one owner, keeps its recipe, and refuses another one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepswe.config import Recipe, build_recipe
from deepswe.errors import RunError
from deepswe.training.run import own_run, write_json


def recipe(directory: Path, steps: int = 3) -> Recipe:
    tree = {
        "run": {"name": "r", "directory": str(directory)},
        "tasks": {"kind": "frozenlake"},
        "training": {"steps": steps},
    }
    return build_recipe(tree, origin="test")


def test_a_new_run_keeps_its_resolved_recipe_and_the_versions(tmp_path: Path) -> None:
    with own_run(recipe(tmp_path), resume=False) as run:
        saved = json.loads(run.recipe.read_text())
        assert saved["training"]["steps"] == 3
        assert saved["algorithm"]["clip_high"] == 0.28
        assert json.loads(run.environment.read_text())["packages"]["pydantic"]


def test_a_second_run_in_the_same_directory_is_refused_without_resume(tmp_path: Path) -> None:
    with own_run(recipe(tmp_path), resume=False) as run:
        run.metrics.write_text("{}\n")
    with pytest.raises(RunError, match="--resume"), own_run(recipe(tmp_path), resume=False):
        pass
    with own_run(recipe(tmp_path), resume=True):
        pass


def test_a_start_that_failed_before_its_first_record_is_no_run(tmp_path: Path) -> None:
    with own_run(recipe(tmp_path), resume=False) as run:
        run.metrics.touch()
    with own_run(recipe(tmp_path, steps=4), resume=False) as run:
        assert json.loads(run.recipe.read_text())["training"]["steps"] == 4


def test_another_recipe_is_refused_and_the_change_is_named(tmp_path: Path) -> None:
    with own_run(recipe(tmp_path), resume=False) as run:
        run.metrics.write_text("{}\n")
    with (
        pytest.raises(RunError, match=r"training\.steps was 3 and is 4"),
        own_run(recipe(tmp_path, steps=4), resume=True),
    ):
        pass


def test_a_run_that_another_process_owns_is_refused_with_its_pid(tmp_path: Path) -> None:
    code = (
        "import fcntl, os, sys\n"
        f"fd = os.open({str(tmp_path / 'r' / 'lock')!r}, os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX); os.write(fd, str(os.getpid()).encode())\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    (tmp_path / "r").mkdir()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=f"in use by process {other.pid}"), own_run(recipe(tmp_path), resume=True):
            pass
        other.communicate()
    with own_run(recipe(tmp_path), resume=True):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="cannot be written"), own_run(recipe(tmp_path), resume=False):
        pass


def test_a_run_path_under_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"), own_run(recipe(tmp_path / "file"), resume=False):
        pass


def test_a_replaced_file_is_whole_and_leaves_no_temporary(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    write_json(tmp_path / "a.json", {"x": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("damaged", [b"{", b"\xff", b"5", b"[" * 200_000])
def test_a_damaged_recipe_of_a_run_is_one_error(tmp_path: Path, damaged: bytes) -> None:
    with own_run(recipe(tmp_path), resume=False) as run:
        run.metrics.write_text("{}\n")
        run.recipe.write_bytes(damaged)
    with pytest.raises(RunError, match=r"recipe\.json .*restore it"), own_run(recipe(tmp_path), resume=True):
        pass
