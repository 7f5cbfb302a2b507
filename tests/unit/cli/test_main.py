"""Bad input is one clear line on stderr and an exit code that is not 0; the command starts without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepswe.cli.main import _has_resume, main

RECIPE = """
[run]
name = "r"
directory = "{directory}"
[tasks]
kind = "frozenlake"
"""


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["deepswe", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.stepz=3"], "training.stepz is not a known key"),
        (["training.steps=many"], "training.steps"),
        (["training.steps=-1"], "training.steps"),
        (["sandbox.backend=other"], "sandbox.backend"),
        (["tasks.kind=other"], "tasks"),
        (["nonsense"], "section.key=value"),
        (["rollout.group_size=1"], "leave_one_out needs at least 2"),
        (["run.name=a/b"], "run.name"),
        (["model.path=/nowhere/model"], "/nowhere/model"),
        (["rollout.tasks_per_step=999999"], "999999"),
    ],
)
def test_a_bad_recipe_is_one_line_that_names_the_key(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(RECIPE.format(directory=tmp_path))
    code, error = run(monkeypatch, capsys, "train", str(recipe), *arguments)
    assert code == 1
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_and_a_broken_recipe_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run(monkeypatch, capsys, "train", str(tmp_path / "no.toml"))
    assert code == 1
    assert "no.toml cannot be read" in error
    (tmp_path / "bad.toml").write_text("[run\n")
    code, error = run(monkeypatch, capsys, "train", str(tmp_path / "bad.toml"))
    assert code == 1
    assert "not valid TOML" in error


def test_a_report_of_no_run_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run(monkeypatch, capsys, "report", str(tmp_path / "nothing"))
    assert code == 1
    assert "nothing" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("module", ["deepswe", "deepswe.config", "deepswe.cli.main", "deepswe.tasks.task"])
def test_importing_the_package_its_config_or_its_command_loads_no_torch(module: str) -> None:
    check = "import sys; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    whole = "; from deepswe.cli.app import build_app; build_app()" if module == "deepswe.cli.main" else ""
    code = f"import {module}{whole}; {check}"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "command"),
    [
        ("deep.jsonl", "[" * 100_000, ["tasks", "rate"]),
        ("deep.json", "[" * 100_000, ["tasks", "import"]),
        ("lock.json", '{"a": 1}', ["tasks", "restore"]),
        ("cut.json", '[{"a": "b', ["tasks", "restore"]),
    ],
)
def test_broken_input_files_are_one_line(
    name: str,
    content: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(content)
    code, error = run(monkeypatch, capsys, *command, str(tmp_path / name))
    assert code == 1
    assert error.startswith("deepswe: ")
    assert error.count("\n") == 1


def test_an_output_that_cannot_be_written_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, error = run(
        monkeypatch, capsys, "sandbox", "manifests", "--image", "a", "--out", str(tmp_path / "file" / "x")
    )
    assert code == 1
    assert str(tmp_path / "file") in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["tasks", "commits", "nowhere", "--out", "OUT"],
        ["tasks", "synth", "nowhere", "--out", "OUT"],
        ["tasks", "validate", "bundled", "--limit", "1", "--out", "OUT"],
    ],
)
def test_a_name_that_no_task_set_can_have_is_refused_before_the_work(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPSWE_CACHE", str(tmp_path / "cache"))
    out = str(tmp_path / "tasks.csv")
    code, error = run(monkeypatch, capsys, *(out if word == "OUT" else word for word in command))
    assert code == 1
    assert "tasks.csv does not end in .parquet" in error
    assert not list(tmp_path.glob("tasks.csv*"))


def test_importing_nothing_usable_fails_and_leaves_the_output_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "set.jsonl").write_text("mine")
    code, error = run(
        monkeypatch, capsys, "tasks", "import", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "set.jsonl")
    )
    assert code == 1
    assert "rows.jsonl holds no usable task" in error
    assert (tmp_path / "set.jsonl").read_text() == "mine"


@pytest.mark.parametrize("command", ["build", "show"])
def test_a_wrong_recipe_is_told_before_torch_is_imported(command: str) -> None:
    code = (
        f"import sys; from deepswe.cli.main import main; sys.argv = ['deepswe', 'tasks', {command!r}, 'no.toml', 'x']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    sys.exit(3 if 'torch' in sys.modules else ended.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no.toml cannot be read" in done.stderr


def test_sigterm_closes_what_is_open_as_ctrl_c_does(tmp_path: Path) -> None:
    code = (
        "import os, signal, tempfile, time, deepswe.cli.main as command\n"
        "def work(words):\n"
        f"    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)\n"
        "command.run = work\n"
        "command.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_the_parser_takes_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deepswe.simulate.profile.load_profile", _interrupt)
    recipe = str(Path(__file__).parents[3] / "recipes" / "frozenlake.toml")
    code, error = run(monkeypatch, capsys, "simulate", recipe, "--profile", "any.toml")
    assert (code, error.splitlines()[-1]) == (130, "deepswe: interrupted; nothing recorded is lost")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "recipe.toml"), True),
        (("eval", "recipe.toml", "--attempts", "2"), True),
        (("tasks", "synth", "shop"), True),
        (("tasks", "lock", "shop.jsonl"), False),
        (("tasks",), False),
        (("curves", "runs/a"), False),
        (("nothing",), False),
        ((), False),
    ],
)
def test_an_interrupt_names_resume_where_the_command_has_it(words: tuple[str, ...], said: bool) -> None:
    assert _has_resume(words) is said


def _interrupt(path: Path) -> None:
    raise KeyboardInterrupt
