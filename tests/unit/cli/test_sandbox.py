"""`deepswe sandbox`: one JSON object as the last line, and one clear line for what is wrong."""

import asyncio
import json
import sys

import pytest

from deepswe.cli.main import main
from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError, SandboxUnavailable
from deepswe.sandbox.census import Census, _over_backends


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


@pytest.mark.parametrize("command", ["ls", "reap"])
def test_backends_that_are_not_here_are_one_line_and_a_failure_is_its_own(monkeypatch, capsys, command):
    async def census(config, backend):
        silent = {"docker": "no socket", "podman": "it broke", "kubernetes": "no cluster"}
        return Census((), silent, ("docker", "kubernetes"))

    monkeypatch.setattr(f"deepswe.sandbox.census.{'list_sandboxes' if command == 'ls' else command}", census)
    code, _, error = run(monkeypatch, capsys, command)
    assert code == 0
    assert error.splitlines() == [
        "deepswe: podman did not finish: it broke",
        "not reachable: docker, kubernetes (why: --backend NAME)",
    ]


def test_what_cannot_be_asked_is_absent_and_what_fails_is_not(monkeypatch):
    async def ask(module, chosen):
        if chosen.backend != "bubblewrap":
            raise SandboxUnavailable("none here") if chosen.backend == "docker" else SandboxError("it broke")
        return []

    found = asyncio.run(_over_backends(SandboxConfig(), None, ask))
    assert set(found.silent) == {"docker", "podman", "kubernetes"}
    assert found.absent == ("docker",)


def test_ls_and_reap_print_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for command, key in (("ls", "sandboxes"), ("reap", "reaped")):
        code, out, _ = run(monkeypatch, capsys, command, "--backend", "bubblewrap", "--json")
        assert code == 0
        assert json.loads(out) == {key: [], "silent": {}}
