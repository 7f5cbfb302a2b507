"""`deepswe sandbox`: one JSON object as the last line, and one clear line for what is wrong."""

import json
import sys

import pytest

from deepswe.cli.main import main


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["deepswe", "sandbox", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_check_tells_what_passed(monkeypatch, capsys):
    only = ["--only", "exit_code_and_streams_come_back_apart", "--only", "an_executable_file_runs"]
    code, out, _ = run(monkeypatch, capsys, "check", "--backend", "bubblewrap", "--json", *only)
    row = json.loads(out.splitlines()[-1])
    assert code == 0
    assert (row["passed"], row["failed"], row["refused"]) == (2, 0, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "--only", "nothing"], "no check is named 'nothing'"),
        (["check", "sandbox.memori=1"], "memori is not a known key"),
        (["ls", "training.steps=1"], "training.steps=1' is no setting of a sandbox"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, arguments, words):
    code, _, error = run(monkeypatch, capsys, *arguments)
    assert code == 1
    assert words in error
    assert len(error.splitlines()) == 1


def test_ls_and_reap_print_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for command, key in (("ls", "sandboxes"), ("reap", "reaped")):
        code, out, _ = run(monkeypatch, capsys, command, "--backend", "bubblewrap", "--json")
        assert code == 0
        assert json.loads(out) == {key: [], "silent": {}}
