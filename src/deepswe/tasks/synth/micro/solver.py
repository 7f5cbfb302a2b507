"""The reference solver of micro tasks: a teacher of the format, and of judgement only in part.

It looks at the file (after a search where the issue names none), replaces one line and submits. In a share of its
trajectories the edit is a guess: another one-line edit of the same function, drawn evenly over the lines and then
over the edits of that line. So a policy that imitates it learns the tools, to copy exactly and which edits there
are; which edit is right it learns in part, and the rest from the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Generator
from dataclasses import dataclass
from random import Random

from deepswe.errors import TaskError
from deepswe.tasks.synth.micro.edits import TRAINING_KINDS, edits
from deepswe.tasks.task import HiddenTests, Task
from deepswe.types import ToolCall


@dataclass(frozen=True, slots=True)
class _Fix:
    """The right edit, read from the gold patch."""

    path: str
    function: str
    old: str
    new: str


def micro_solver(task: Task, hidden: HiddenTests, *, seed: int, mistakes: float) -> Generator[ToolCall, str, None]:
    """The solver's calls, one a turn; it is sent each observation and needs none of them.

    Args:
        task: a micro task.
        hidden: its hidden tests, whose gold patch is the right edit.
        seed: with the same task and seed, the same calls.
        mistakes: chance that the edit is a guess.

    Raises:
        TaskError: the gold patch is not the one-line patch of a micro task.
    """
    random = Random(f"solver {task.id} {seed}")
    fix = _read_fix(task, hidden)
    old, new = fix.old, fix.new
    if random.random() < mistakes:
        old, new = _guess(task.repository.files[fix.path], fix, random)
    if fix.path not in task.problem_statement:
        yield ToolCall("search", {"search_term": f"def {fix.function}"})
    yield ToolCall("file_editor", {"command": "view", "path": fix.path})
    edit = {"command": "str_replace", "path": fix.path, "old_str": old, "new_str": new, "concise": "true"}
    yield ToolCall("file_editor", edit)
    yield ToolCall("finish", {})


def _read_fix(task: Task, hidden: HiddenTests) -> _Fix:
    lines = hidden.gold_patch.splitlines()
    removed = [line[1:] for line in lines if line.startswith("-") and not line.startswith("---")]
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    paths = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]
    if not (len(removed) == len(added) == len(paths) == 1) or paths[0] not in task.repository.files:
        raise TaskError(f"the gold patch of {task.id} is no one-line patch; the reference solver is for micro tasks")
    source = task.repository.files[paths[0]]
    number = source.split("\n").index(removed[0]) + 1
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.lineno <= number <= (node.end_lineno or node.lineno):
            return _Fix(paths[0], node.name, removed[0].strip(), added[0].strip())
    raise TaskError(f"the gold patch of {task.id} is outside of every function; the reference solver cannot read it")


def _guess(source: str, fix: _Fix, random: Random) -> tuple[str, str]:
    """(old, new) of a wrong one-line edit whose old text occurs once; the right one if there is no other."""
    lines = source.split("\n")
    by_line: dict[str, list[str]] = {}
    for edit in edits(source, fix.function):
        old, new = lines[edit.line].strip(), edit.text.strip()
        if edit.kind in TRAINING_KINDS and (old, new) != (fix.old, fix.new) and source.count(old) == 1:
            by_line.setdefault(old, []).append(new)
    if not by_line:
        return fix.old, fix.new
    old = random.choice(list(by_line))
    return old, random.choice(by_line[old])
