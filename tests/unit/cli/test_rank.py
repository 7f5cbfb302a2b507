import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepswe.cli.rank import curves, rank
from deepswe.errors import ConfigError
from deepswe.rollout.store import TrajectoryStore
from deepswe.scaling.candidates import load_candidates
from deepswe.scaling.scores import ScoreBook
from deepswe.types import Ending, Graded, Trajectory


def deepswe(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("deepswe")), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def make_run(path: Path) -> Path:
    """Two tasks with three candidates each, of which the last is right; the verifier knows it."""
    with TrajectoryStore(path).begin("after_heldout", 1, keep=False)[0] as segment:
        for task in "ab":
            for attempt in range(3):
                patch = f"diff --git a/m b/m\n--- a/m\n+++ b/m\n@@ -1 +1 @@\n-x\n+{attempt}\n"
                grade = Graded(float(attempt == 2))
                segment.append(
                    Trajectory(task, attempt, "after_heldout", 1, (), (), Ending.SUBMITTED, grade, artifact=patch)
                )
        segment.commit()
    book = ScoreBook.open(path / "scores.jsonl")
    for candidate in load_candidates(path)[0]:
        book.append(candidate, verifier=0.9 if candidate.outcome else 0.2)
    return book.path


def test_rank_writes_one_prediction_a_task_and_curves_draw_the_gain(tmp_path: Path) -> None:
    scores = make_run(tmp_path)
    done = deepswe("rank", str(tmp_path), "--scores", str(scores), "--out", str(tmp_path / "chosen.jsonl"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tasks"] == 2
    chosen = [json.loads(line) for line in (tmp_path / "chosen.jsonl").read_text().splitlines()]
    assert [(row["instance_id"], row["model_patch"][-2:]) for row in chosen] == [("a", "2\n"), ("b", "2\n")]

    done = deepswe(
        "curves", str(tmp_path), "--scores", str(scores), "--k", "1,3", "--out", str(tmp_path / "c.png"), "--json"
    )
    assert done.returncode == 0, done.stderr
    first, last = json.loads(done.stdout)["points"]
    assert first["best"]["verifier"]["mean"] == pytest.approx(first["pass_at_k"]["mean"]) == pytest.approx(1 / 3)
    assert last["best"]["verifier"]["mean"] == last["best"]["hybrid"]["mean"] == 1.0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_curves_prints_a_table_with_a_line_for_each_k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves(tmp_path, make_run(tmp_path), tmp_path / "c.png", k="1,3")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["K", "tasks", "Pass@K", "verifier"]
    assert [line.split()[:4] for line in lines[2:4]] == [["1", "2", "33.3%", "33.3%"], ["3", "2", "100.0%", "100.0%"]]


def test_the_majority_needs_no_scores_and_other_methods_say_that_they_do(tmp_path: Path) -> None:
    make_run(tmp_path)
    rank(tmp_path, tmp_path / "chosen.jsonl", method="majority")
    assert len((tmp_path / "chosen.jsonl").read_text().splitlines()) == 2
    with pytest.raises(ConfigError, match="--method hybrid chooses by scores; give --scores FILE"):
        rank(tmp_path, tmp_path / "other.jsonl")


def test_a_method_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    scores = make_run(tmp_path)
    done = deepswe("rank", str(tmp_path), "--scores", str(scores), "--out", str(tmp_path / "o"), "--method", "best")
    assert done.returncode == 1
    assert "no selection method 'best'" in done.stderr
    assert done.stderr.count("\n") == 1
