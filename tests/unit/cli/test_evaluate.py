"""The commands around an evaluation, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from deepswe.cli.app import build_app
from deepswe.errors import ConfigError

LAKE = '[run]\nname = "{name}"\ndirectory = "{directory}"\n[tasks]\nkind = "frozenlake"\nheldout = 3\nmax_size = 3\n'


def run(*words: object) -> str:
    done = CliRunner().invoke(build_app(), [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_run_is_evaluated_compared_ranked_exported_swept_and_replayed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(LAKE.format(name=name, directory=tmp_path))
    tape = tmp_path / "tape.jsonl"
    words = ("--policy", "reference", "--attempts", 2)
    table = json.loads(run("eval", tmp_path / "a.toml", *words, "--record", tape, "--json").splitlines()[-1])
    assert table["pass_at_1"]["mean"] == 1.0
    assert "100.0%" in run("eval", tmp_path / "b.toml", *words)
    found = json.loads(run("compare", tmp_path / "a", tmp_path / "b", "--json"))
    assert (found["difference"]["mean"], found["both"], found["p_value"]) == (0.0, 3, 1.0)
    assert "3" in run("compare", tmp_path / "a", tmp_path / "b")
    rows = json.loads(run("leaderboard", f"ours={tmp_path / 'a'}", tmp_path / "b", "--json"))
    assert {row["name"] for row in rows} == {"ours", "b (reference)"}
    counts = json.loads(run("export", tmp_path / "a", "--out", tmp_path / "preds.jsonl"))
    assert counts["tasks"] == len((tmp_path / "preds.jsonl").read_text().splitlines()) == 3
    (point,) = json.loads(run("sweep", tmp_path / "a", "--steps", "50", "--json"))
    assert (point["kept"], point["estimate"]["mean"]) == (6, 1.0)
    swept = run("sweep", tmp_path / "a", "--steps", "50").splitlines()
    assert [line.split()[:3] for line in swept if line.startswith("steps")] == [["steps", "50", "100.0%"]]
    assert json.loads(run("replay", tape, "--json"))["different"] == []


def test_what_does_not_go_together_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(LAKE.format(name="a", directory=tmp_path))
    words = ["eval", str(tmp_path / "a.toml"), "--policy", "noop", "--checkpoint", "x"]
    assert isinstance(CliRunner().invoke(build_app(), words).exception, ConfigError)
    assert isinstance(CliRunner().invoke(build_app(), ["sweep", str(tmp_path)]).exception, ConfigError)
    assert isinstance(
        CliRunner().invoke(build_app(), ["leaderboard", str(tmp_path), "--size", "a=b"]).exception, ConfigError
    )
