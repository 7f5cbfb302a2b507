"""`deepswe --help` imports next to nothing, and says all the same what the parsers would say."""

import inspect
import os
import subprocess
import sys
from importlib import import_module

import pytest
import typer
from typer.testing import CliRunner

from deepswe.cli.app import build_app
from deepswe.cli.commands import COMMANDS, top_help
from deepswe.cli.main import main

HEAVY = {"typer", "pydantic", "rich", "asyncio", "json", "pathlib", "dataclasses", "subprocess", "typing", "inspect"}


def run(code: str, **environment: str) -> str:
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]
    environ = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environ).stdout


def loaded_by(*words: str) -> set[str]:
    code = (
        f"sys.argv = ['deepswe', *{words!r}]\n"
        "from deepswe.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print()\n"
        "print(' '.join(sys.modules))"
    )
    return set(run(code).splitlines()[-1].split())


def test_the_help_imports_no_parser_no_command_and_none_of_the_parts() -> None:
    loaded = loaded_by("--help")
    assert not HEAVY & loaded
    ours = {name for name in loaded if name.startswith("deepswe")}
    assert ours == {"deepswe", "deepswe.cli", "deepswe.cli.commands", "deepswe.cli.main", "deepswe.errors"}


def test_one_command_does_not_import_the_others_nor_what_it_needs_only_when_it_runs() -> None:
    loaded = loaded_by("plan", "--help")
    others = {place.partition(":")[0] for place, _ in COMMANDS.values()} - {"deepswe.cli.plan"}
    assert "deepswe.cli.plan" in loaded
    assert not (others | {"rich", "asyncio", "deepswe.config"}) & loaded


def test_the_help_is_what_the_parsers_would_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = CliRunner().invoke(build_app(), ["--help"], prog_name="deepswe").output
    assert printed == top_help() + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_how_its_own_help_begins(name: str) -> None:
    place, line = COMMANDS[name]
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    own = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    assert own is not None
    assert " ".join(own.split()).startswith(line.rstrip("."))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "Usage: deepswe"),
        (["--version"], 0, "deepswe 0."),
        ([], 2, "Usage: deepswe"),
        (["trian"], 2, "Did you mean 'train'"),
        (["-h"], 2, "No such option"),
    ],
)
def test_a_command_line_without_a_command_ends_with_its_code(
    words: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deepswe", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code or 0) == code
    assert said in (told.err if code else told.out)


@pytest.mark.parametrize(("typed", "completed"), [("deepswe ta", ["tasks"]), ("deepswe tasks val", ["validate"])])
def test_a_shell_is_told_how_a_word_goes_on(typed: str, completed: list[str]) -> None:
    code = "sys.argv = ['deepswe']\nfrom deepswe.cli.main import main\nmain()"
    asked = {"_DEEPSWE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    assert run(code, **asked).split() == completed
