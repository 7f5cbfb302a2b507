"""Micro tasks are true, distinct between splits, and what the issue shows is not all that is tested."""

import ast
import io
import re
import subprocess
import sys
import unittest
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from deepswe.config import MicroTasks
from deepswe.errors import TaskError
from deepswe.tasks.synth.micro.edits import TRAINING_KINDS, UNSEEN_KINDS, apply, edits
from deepswe.tasks.synth.micro.generate import micro_task
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.synth.micro.naming import WORDS, is_heldout_constant
from deepswe.tasks.synth.micro.shapes import BY_NAME, SHAPES
from deepswe.tasks.synth.micro.solver import micro_solver
from deepswe.tasks.synth.micro.templates import Module
from deepswe.tasks.task import HiddenTests, Task
from deepswe.types import ToolCall

CONFIG = MicroTasks(train=240, heldout=60, unseen=40, seed=3)


@pytest.fixture(scope="module")
def tasks():
    return micro_task_set(CONFIG)


def outcomes(files: Mapping[str, str], hidden: HiddenTests) -> dict[str, bool]:
    """Test id -> passed, by running the hidden tests in this process over the given files."""
    (path, text), *_ = hidden.files.items()
    module = ModuleType(path.removeprefix("tests/test_").removesuffix(".py"))
    exec(files[f"{module.__name__}.py"], module.__dict__)
    sys.modules[module.__name__] = module
    try:
        namespace: dict[str, object] = {"__name__": "hidden"}
        exec(text, namespace)
    finally:
        del sys.modules[module.__name__]
    (case,) = [v for v in namespace.values() if isinstance(v, type) and issubclass(v, unittest.TestCase)]
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    names = [test.id().rpartition(".")[2] for test in suite]
    result = unittest.TextTestRunner(io.StringIO()).run(suite)
    bad = {test.id().rpartition(".")[2] for test, _ in (*result.failures, *result.errors)}
    return {f"{path}::{case.__name__}::{name}": name not in bad for name in names}


def patched(task: Task, hidden: HiddenTests) -> dict[str, str]:
    lines = hidden.gold_patch.splitlines()
    path = lines[1].removeprefix("+++ b/")
    (old,) = (line[1:] for line in lines[2:] if line.startswith("-"))
    (new,) = (line[1:] for line in lines[2:] if line.startswith("+"))
    files = dict(task.repository.files)
    assert files[path].split("\n").count(old) == 1
    files[path] = files[path].replace(old + "\n", new + "\n")
    return files


def names_of(task: Task) -> tuple[set[str], set[int]]:
    """Names of functions and constants of the code files of a task."""
    functions: set[str] = set()
    constants: set[int] = set()
    for path, text in task.repository.files.items():
        if path.startswith("test_") or not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                functions.add(node.name)
                constants |= set(map(int, re.findall(r"\d+", ast.get_docstring(node) or "")))
    return functions, {c for c in constants if c > 1}


def test_gold_passes_all_and_the_bug_fails_exactly_the_fail_to_pass(tasks):
    for task in tasks.tasks:
        hidden = tasks.hidden[task.id]
        wanted = {*hidden.fail_to_pass, *hidden.pass_to_pass}
        assert len(hidden.fail_to_pass) >= 2
        assert len(hidden.pass_to_pass) >= 1
        before, after = outcomes(task.repository.files, hidden), outcomes(patched(task, hidden), hidden)
        assert {name for name, passed in before.items() if not passed} == set(hidden.fail_to_pass)
        assert after == dict.fromkeys(wanted, True)


def test_a_fix_of_the_shown_case_alone_fails_a_hidden_case(tasks):
    for task in tasks.tasks[:60]:
        hidden = tasks.hidden[task.id]
        text = next(iter(hidden.files.values()))
        shown = [
            case for case in re.findall(r"assertEqual\((\w+\(.*\)), .*\)\n", text) if case in task.problem_statement
        ]
        assert len(shown) < len(hidden.fail_to_pass)


def test_git_applies_the_gold_patch(tasks, tmp_path: Path):
    task = tasks.tasks[0]
    for path, text in task.repository.files.items():
        (tmp_path / path).write_text(text)
    hidden = tasks.hidden[task.id]
    subprocess.run(["git", "apply", "-"], input=hidden.gold_patch, text=True, cwd=tmp_path, check=True)
    assert {path: (tmp_path / path).read_text() for path in task.repository.files} == patched(task, hidden)


def test_visible_tests_pass_with_the_bug(tasks):
    seen = 0
    for task in tasks.tasks[:80]:
        for path, text in task.repository.files.items():
            if path.startswith("test_"):
                visible = HiddenTests(task.id, {f"tests/{path}": text}, (), ())
                assert all(outcomes(task.repository.files, visible).values())
                seen += 1
    assert seen > 20


def test_same_config_same_set_and_a_larger_one_extends_it(tasks):
    again = micro_task_set(CONFIG.model_copy(update={"train": 60, "heldout": 0, "unseen": 0}))
    assert again.tasks == tasks.split("train")[:60]
    assert not {t.problem_statement for t in tasks.split("train")} & {
        micro_task("train", n, seed=4)[0].problem_statement for n in range(20)
    }


def test_heldout_names_of_functions_constants_and_structures_are_never_in_training(tasks):
    functions: set[str] = set()
    constants: set[int] = set()
    for task in tasks.split("train"):
        for known, new in zip((functions, constants), names_of(task), strict=True):
            known.update(new)  # type: ignore[arg-type]
    assert not any(map(is_heldout_constant, constants))
    for task in (*tasks.split("heldout"), *tasks.split("unseen")):
        found = names_of(task)
        assert not found[0] & functions
        assert not found[1] & constants
    structures = {split: {t.tags["structure"] for t in tasks.split(split)} for split in ("train", "heldout")}
    assert not structures["train"] & structures["heldout"]
    assert all(BY_NAME[name].heldout for name in structures["heldout"])
    assert not any(BY_NAME[name].heldout for name in structures["train"])


def test_every_subword_and_part_of_a_heldout_task_is_known_from_training():
    words = {
        word for n in range(200) for name in names_of(micro_task("train", n, seed=0)[0])[0] for word in name.split("_")
    }
    assert words == set(WORDS)
    composed = [shape for shape in SHAPES if "-" in shape.name]
    for part in (0, 1):
        held = {shape.name.split("-")[part] for shape in composed if shape.heldout}
        assert held <= {shape.name.split("-")[part] for shape in composed if not shape.heldout}


def test_unseen_kinds_are_in_their_own_split_only(tasks):
    kinds = {split: Counter(t.kind for t in tasks.split(split)) for split in ("train", "heldout", "unseen")}
    assert set(kinds["train"]) <= TRAINING_KINDS
    assert set(kinds["heldout"]) <= TRAINING_KINDS
    assert set(kinds["unseen"]) == UNSEEN_KINDS
    assert max(kinds["unseen"].values()) - min(kinds["unseen"].values()) <= 1
    assert not TRAINING_KINDS & UNSEEN_KINDS


def test_many_kinds_and_structures_in_training():
    drawn = [micro_task("train", n, seed=1)[0] for n in range(200)]
    assert len({task.kind for task in drawn}) >= 12
    assert len({task.tags["structure"] for task in drawn}) >= 60


def test_an_unknown_split_is_refused():
    with pytest.raises(TaskError, match="no split 'dev'; use train"):
        micro_task("dev", 0, seed=0)


def test_edits_of_a_line_by_kind():
    source = (
        'def f(a, b=3):\n    """D."""\n    if a >= b and not a.upper():\n        return a - b\n    return min(a, 7)\n'
    )
    found = {(edit.line, edit.text.strip(), edit.kind) for edit in edits(Module.read(source), "f")}
    assert (0, "def f(a, b=4):", "default") in found
    assert (2, "if a > b and not a.upper():", "boundary") in found
    assert (2, "if a <= b and not a.upper():", "direction") in found
    assert (2, "if a >= b or not a.upper():", "boolean") in found
    assert (2, "if a >= b and not a.lower():", "method") in found
    assert (3, "return b - a", "operands") in found
    assert (3, "return a + b", "arithmetic") in found
    assert (4, "return max(a, 7)", "builtin") in found
    assert (4, "return min(a, 6)", "constant") in found
    assert not any(line == 1 for line, _, _ in found)


def test_apply_changes_one_line():
    source = 'def f(a):\n    """D."""\n    return a + 2\n'
    for edit in edits(Module.read(source), "f"):
        changed = apply(Module.read(source), edit).lines
        assert [i for i, (x, y) in enumerate(zip(changed, source.split("\n"), strict=True)) if x != y] == [edit.line]


def play(task: Task, hidden: HiddenTests, *, mistakes: float, seed: int = 0) -> list[ToolCall]:
    return list(micro_solver(task, hidden, seed=seed, mistakes=mistakes))


def edited(task: Task, calls: list[ToolCall]) -> dict[str, str]:
    (edit,) = (call.arguments for call in calls if call.arguments.get("command") == "str_replace")
    files = dict(task.repository.files)
    assert files[edit["path"]].count(edit["old_str"]) == 1
    files[edit["path"]] = files[edit["path"]].replace(edit["old_str"], edit["new_str"])
    return files


def test_the_solver_without_mistakes_solves_every_task(tasks):
    for task in tasks.split("train"):
        hidden = tasks.hidden[task.id]
        assert all(outcomes(edited(task, play(task, hidden, mistakes=0.0)), hidden).values())


def test_the_solver_that_guesses_makes_another_edit_of_a_known_kind(tasks):
    solved = 0
    for task in tasks.split("train")[:100]:
        hidden = tasks.hidden[task.id]
        files = edited(task, play(task, hidden, mistakes=1.0))
        assert files != dict(task.repository.files)
        solved += files == patched(task, hidden)
    assert solved <= 12  # functions with no other edit


def test_the_share_of_mistakes_is_the_chance_of_each_seed(tasks):
    task = tasks.split("train")[0]
    hidden = tasks.hidden[task.id]
    right = sum(edited(task, play(task, hidden, mistakes=0.4, seed=s)) == patched(task, hidden) for s in range(200))
    assert 95 <= right <= 145


def test_the_solver_searches_where_the_issue_names_no_file(tasks):
    for task in tasks.split("train"):
        calls = play(task, tasks.hidden[task.id], mistakes=0.0)
        names_file = calls[-2].arguments["path"] in task.problem_statement
        assert [call.name for call in calls] == ["search"] * (not names_file) + ["file_editor"] * 2 + ["finish"]
