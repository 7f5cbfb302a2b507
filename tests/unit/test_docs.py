"""The documents say only what is so: their examples run, and the commands and settings in them exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from deepswe.config import BundledTasks, CustomTasks, FrozenLakeTasks, MicroTasks, Recipe, TaskSetTasks, parse_override

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
SECTIONS = "|".join(name for name in Recipe.model_fields if name != "version")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(name), re.MULTILINE | re.DOTALL)


def test_the_recipe_reference_is_up_to_date() -> None:
    script = "import sys, runpy; sys.stdout.write(runpy.run_path('docs/recipe_reference.py')['reference']())"
    made = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == text_of("docs/recipe.md"), "run `python docs/recipe_reference.py`"


def test_a_key_without_a_meaning_is_refused_by_the_generator() -> None:
    script = (
        "import runpy; made = runpy.run_path('docs/recipe_reference.py')\n"
        "made['Recipe'].model_fields['run'].annotation.model_fields['name'].description = ' '\n"
        "made['reference']()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip().endswith("run.name has no meaning: write a docstring under it in deepswe.config")


def examples() -> Iterator[tuple[str, str]]:
    for name in NAMES:
        for code in blocks(name, "python"):
            yield name, code


@pytest.mark.parametrize(("name", "code"), list(examples()), ids=lambda value: value[:30])
def test_python_examples_run(name: str, code: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = re.search(r"^It prints ([^:]+): ", text_of(name), re.MULTILINE)
    if said:
        assert done.stdout.strip() == said[1]


def commands_in(name: str) -> set[str]:
    """Whole command lines in blocks and in inline code."""
    text = text_of(name)
    lines = [line for block in blocks(name, "") for line in block.splitlines()]
    return {line.split("#")[0].strip() for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]}


def deepswe_commands() -> dict[tuple[str, ...], typer.core.TyperCommand]:
    """Every command and its parser."""
    from deepswe.cli.app import build_app

    found = {}

    def walk(group: typer.core.TyperGroup, path: tuple[str, ...]) -> None:
        for name, command in group.commands.items():
            if isinstance(command, typer.core.TyperGroup):
                walk(command, (*path, name))
            else:
                found[(*path, name)] = command

    root = typer.main.get_command(build_app())
    assert isinstance(root, typer.core.TyperGroup)
    walk(root, ())
    return found


def check_command(words: list[str], commands: dict[tuple[str, ...], typer.core.TyperCommand]) -> None:
    path = next((key for key in commands if tuple(words[: len(key)]) == key), None)
    assert path is not None, f"there is no command deepswe {' '.join(words)}"
    options = {option for parameter in commands[path].params for option in parameter.opts}
    has_settings = "overrides" in {parameter.name for parameter in commands[path].params}
    for word in words[len(path) :]:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"deepswe {' '.join(path)} has no option {word}"
        elif "=" in word and has_settings:
            assert known_key(".".join(parse_override(word)[0])), f"{word} is no setting"


def test_every_command_in_the_documents_exists() -> None:
    commands = deepswe_commands()
    checked = 0
    for name in NAMES:
        for line in commands_in(name):
            if line.startswith("deepswe "):
                check_command(shlex.split(line)[1:], commands)
                checked += 1
    assert checked >= 10


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = [line.split() for name in NAMES for line in commands_in(name) if line.startswith("make ")]
    used = {words[1] for words in lines}
    assert {"quickstart", "test"} <= used <= targets


def known_key(key: str) -> bool:
    """Whether a dotted key, or its section, is part of a recipe."""
    nodes: list[type[BaseModel]] = [Recipe]
    for part in key.split("."):
        if not nodes:
            return False
        fields = [node.model_fields[part] for node in nodes if part in node.model_fields]
        if part == "tasks" and nodes == [Recipe]:
            nodes = [CustomTasks, MicroTasks, BundledTasks, TaskSetTasks, FrozenLakeTasks]
        elif not fields:
            return False
        else:
            kinds = [field.annotation for field in fields]
            nodes = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return True


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_in_a_document_exists(name: str) -> None:
    for code in re.findall(r"`([^`\n]+)`", text_of(name)):
        match = re.fullmatch(rf"((?:{SECTIONS})(?:\.[a-z_]+)+)(?:\s*=.*)?", code)
        if match and not match[1].endswith((".py", ".json", ".jsonl", ".toml", ".png", ".html")):
            assert known_key(match[1]), f"{name}: {code} is no setting"


def test_a_wrong_setting_would_be_noticed() -> None:
    assert known_key("algorithm.endings.max_steps.train")
    assert known_key("tasks.solvable_within")
    assert not known_key("algorithm.no_such_key")
    assert not known_key("training.steps.more")


@pytest.mark.parametrize("name", NAMES)
def test_links_and_source_files_in_a_document_exist(name: str) -> None:
    page = ROOT / name
    text = text_of(name)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
        if target != "docs/quickstart.png":  # made by the run whose result stands beside it
            assert (page.parent / target).exists(), f"{name} links to {target}"
    for path in re.findall(r"`((?:src|docs|tests|benchmarks|recipes)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{name} names {path}"
    if name == "README.md":
        for path in re.findall(r"`((?:[a-z]+/)?[a-z_]+\.py|[a-z]+/)`", text):
            assert (ROOT / path).exists() or (ROOT / "src/deepswe" / path).exists(), f"{name} names {path}"


def test_the_licence_is_the_one_that_the_package_declares() -> None:
    licence = text_of("LICENSE").split()
    assert licence[:4] == ["Apache", "License", "Version", "2.0,"]
    assert 'license = "Apache-2.0"' in text_of("pyproject.toml")
