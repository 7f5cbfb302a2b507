"""A command never writes in the place of what it reads, and nothing that it reads moves the terminal's cursor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deepswe.cli.lines import one_line
from deepswe.cli.main import main
from deepswe.cli.places import free_place
from deepswe.errors import ConfigError

ODD = "\x1b[2J[/x]{t}$\\bad$\u202e"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["deepswe", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def published(path: Path, *resolved: str, name: str = "theirs") -> Path:
    path.write_text(json.dumps({"submission": name, "resolved": resolved, "total": 4}))
    return path


@pytest.mark.parametrize("out", ["in.jsonl", "link.jsonl", "run/metrics.jsonl", "run/trajectories/train-000001.zst"])
def test_what_is_read_and_what_a_run_recorded_is_never_replaced(tmp_path: Path, out: str) -> None:
    (tmp_path / "run" / "trajectories").mkdir(parents=True)
    (tmp_path / "in.jsonl").write_text("")
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    with pytest.raises(ConfigError, match="give another name"):
        free_place("--out", tmp_path / out, tmp_path / "in.jsonl", f"{tmp_path / 'run'}:train")
    free_place("--out", tmp_path / "new.jsonl", tmp_path / "in.jsonl", tmp_path / "run")
    free_place("--out", tmp_path / "run" / "chosen.jsonl", tmp_path / "in.jsonl", tmp_path / "run")


def test_a_picture_in_the_place_of_results_is_refused_and_the_results_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = published(tmp_path / "results.json", "a")
    before = results.read_bytes()
    assert run(monkeypatch, "leaderboard", results, "--picture", results) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert results.read_bytes() == before


def test_names_out_of_files_are_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = published(tmp_path / "a.json", ODD.format(t="one"), "both", name=ODD.format(t="first"))
    second = published(tmp_path / "b.json", ODD.format(t="two"), "both", name=ODD.format(t="second"))
    assert run(monkeypatch, "compare", first, second, "--force") == 0
    assert run(monkeypatch, "leaderboard", first, second, "--picture", tmp_path / "p.png") == 0
    said = capsys.readouterr()
    assert "[/x]one" in said.out
    assert "[/x]first" in said.out
    assert run(monkeypatch, "compare", first, second) == 1
    assert not set("\x1b\u202e") & set(said.out + said.err + capsys.readouterr().err)


def test_a_message_of_any_text_is_one_line() -> None:
    assert one_line("a\n\n b\x1b[2J\r\udcff\u2028c") == "a; b⟨U+001B⟩[2J; ⟨U+DCFF⟩; c"


@pytest.mark.parametrize("size", ["ours", "theirs=nan", "theirs=-3", "theirs=inf", "theirs=0"])
def test_a_size_that_is_none_is_refused(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "leaderboard", published(tmp_path / "a.json", "a"), "--size", size) == 1
    assert capsys.readouterr().err.count("\n") == 1
