"""The reference solver of micro tasks: a teacher of the format, and of judgement only in part.

It looks at the file (after a search where the issue names none), replaces the words of one line that change (and as
many beside them as make the piece unique in the file) and submits. In a share of its trajectories the edit is a guess:
another one-line edit of the same function, its kind drawn as the kinds of bugs are. So a
policy that imitates it learns the tools, to copy exactly and which edits there are; which edit is right it learns in
part, and the rest from the tests.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from random import Random

from deepswe.errors import TaskError
from deepswe.tasks.synth.micro.edits import TRAINING_KINDS, draw_kind, edits
from deepswe.tasks.synth.micro.templates import Module
from deepswe.tasks.task import HiddenTests, Task
from deepswe.types import ToolCall


@dataclass(frozen=True, slots=True)
class _Fix:
    """The right edit, read from the gold patch; `old` and `new` are whole lines."""

    path: str
    module: Module
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
    source = fix.module.source
    old, new = fix.old, fix.new
    if random.random() < mistakes:
        old, new = _guess(fix, random)
    old, new = fragment(source, old, new)
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
    module = Module.read(task.repository.files[paths[0]])
    number = module.lines.index(removed[0])
    for function in module.outlines():
        if function.first <= number < function.end:
            return _Fix(paths[0], module, function.name, removed[0], added[0])
    raise TaskError(f"the gold patch of {task.id} is outside of every function; the reference solver cannot read it")


def _guess(fix: _Fix, random: Random) -> tuple[str, str]:
    """(old, new) lines of a wrong edit whose old line occurs once; the right ones if there is no other."""
    source, lines = fix.module.source, fix.module.lines
    others = [
        edit
        for edit in edits(fix.module, fix.function)
        if edit.kind in TRAINING_KINDS
        and (lines[edit.line], edit.text) != (fix.old, fix.new)
        and source.count(lines[edit.line].strip()) == 1
    ]
    if not others:
        return fix.old, fix.new
    kind = draw_kind((edit.kind for edit in others), random)
    chosen = random.choice([edit for edit in others if edit.kind == kind])
    return lines[chosen.line], chosen.text


_WORD = re.compile(r'^\s+| ?(?:"[^"]*"|\w+|[<>=!+\-*/%]=|//|\S)')


def fragment(source: str, old: str, new: str) -> tuple[str, str]:
    """The shortest piece of a line that shows its change: (its text before, its text after).

    It holds the words that change, then further words, right and left in turn, until it occurs once in the file.

    Args:
        source: the file.
        old: a whole line of it; stripped, it occurs once.
        new: the line after the edit.
    """
    before, after = _WORD.findall(old), _WORD.findall(new)
    start = next(i for i, (x, y) in enumerate(zip([*before, ""], [*after, ""], strict=False)) if x != y)
    shared = min(len(before), len(after)) - start
    end = next((n for n in range(shared) if before[-1 - n] != after[-1 - n]), shared)
    first = 1 if old[:1].isspace() else 0  # never the indentation
    left, right = max(first, start), end
    while True:
        piece = "".join(before[left : len(before) - right])
        if (piece and source.count(piece) == 1) or (left == first and not right):
            return piece, "".join(after[left : len(after) - right])
        if right:
            right -= 1
        if left > first and source.count("".join(before[left : len(before) - right])) != 1:
            left -= 1
