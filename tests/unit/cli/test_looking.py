"""`deepswe view`, `analyse` and `watch` on a recorded run."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepswe.cli.app import build_app
from deepswe.errors import RunError
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "tried"
    store = TrajectoryStore(directory)
    segment, _ = store.begin("train", 0, keep=False)
    steps = (
        Step("", ToolCall("search", {"search_term": "\u202etotal\x1b[2J"}), "No match"),
        Step("", ToolCall("finish", {}), ""),
    )
    with segment:
        for attempt in range(2):
            segment.append(
                Trajectory(
                    "cart", attempt, "train", 0, (TokenSpan((1,), False),), steps, Ending.SUBMITTED, Graded(attempt)
                )
            )
        segment.commit()
    row = {"kind": "train", "step": 1, "reward_mean": 0.5, "warnings": ["entropy_low"]}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return directory


def output(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_analyse_gives_numbers_as_json_and_a_table(run: Path) -> None:
    found = json.loads(output("analyse", str(run), "--json"))
    assert found["all"]["turns_by_class"]["search"] == 2
    assert "turns an attempt" in output("analyse", str(run))


def test_analyse_shows_each_turn_with_harmless_evidence(run: Path) -> None:
    shown = output("analyse", str(run), "--task", "cart")
    assert "search tool: ⟨U+202E⟩total⟨U+001B⟩[2J" in shown
    assert shown.count("calls finish") == 2
    with pytest.raises(RunError, match="no attempt at a task 'nowhere'"):
        output("analyse", str(run), "--task", "nowhere")


def test_view_writes_one_file(run: Path, tmp_path: Path) -> None:
    path = Path(output("view", str(run), "--out", str(tmp_path / "page.html")).strip())
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_watch_ends_when_nobody_owns_the_run(run: Path) -> None:
    shown = output("watch", str(run))
    assert "unhealthy: entropy_low" in shown
    assert "continue it with --resume" in shown


def test_watch_ends_with_the_run(run: Path) -> None:
    (run / "lock").write_text(f"{os.getpid()}\n", encoding="ascii")
    ends = threading.Timer(0.3, lambda: (run / "summary.json").write_text('{"steps": 1}', encoding="utf-8"))
    ends.start()
    shown = output("watch", str(run), "--every", "0.1")
    ends.join()
    assert "tried: finished" in shown
