"""The tutorial's way from a project of one's own to the first figures, by its own commands and its own recipe."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import coverage
import pytest

from deepswe.cli.main import run
from deepswe.tasks.synth import find, project
from deepswe.tasks.taskset import load_task_set

TUTORIAL = (Path(__file__).parents[3] / "docs" / "tutorial.md").read_text(encoding="utf-8")
CODE = """def price(units, each):
    if units < 0:
        raise ValueError("units")
    total = units * each
    return total - 5 if total > 100 else total
"""
TESTS = """import pytest
from shop import price


@pytest.mark.parametrize("units", range(6))
def test_price(units):
    assert price(units, 3) == 3 * units


def test_discount():
    assert price(50, 3) == 145


def test_no_units():
    with pytest.raises(ValueError):
        price(-1, 3)
"""


def deepswe(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(line.split()[1:])
    assert not ended.value.code, line


def test_the_tutorials_commands_lead_from_a_project_to_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package_index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEEPSWE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package_index))
    monkeypatch.setattr(project, "PYTEST", "pytest==8.9")
    (tmp_path / "tools").mkdir()
    shutil.copytree(Path(coverage.__file__).parent, tmp_path / "tools" / "coverage")
    monkeypatch.setattr(find, "install_tools", lambda cache, pip: tmp_path / "tools")
    (tmp_path / "shop" / "tests").mkdir(parents=True)
    (tmp_path / "shop" / "pyproject.toml").write_text('[project]\nname = "shop"\nversion = "0.1"\n')
    (tmp_path / "shop" / "shop.py").write_text(CODE)
    (tmp_path / "shop" / "tests" / "test_shop.py").write_text(TESTS)
    [recipe] = re.findall(r"^```toml\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
    (tmp_path / "shop.toml").write_text(recipe)
    lines = [line for line in TUTORIAL.splitlines() if re.match(r"deepswe (tasks|eval) .*shop", line)]
    synth, validate, reference, _ = lines
    deepswe(synth.replace("--count 20", "--count 2"))
    deepswe(f"{validate} --runs 1")
    assert {task.split for task in load_task_set(tmp_path / "shop.jsonl").tasks} == {"train"}
    capsys.readouterr()
    deepswe(f"{reference} --json")
    score = json.loads(capsys.readouterr().out)["pass_at_1"]
    assert (score["mean"], score["tasks"], score["attempts"]) == (1.0, 2, 4)
