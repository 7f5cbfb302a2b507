"""Solvers that know the answer: for imitation on training tasks, and to prove that tasks and grading work."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from deepswe.tasks.task import HiddenTests, Task
from deepswe.types import ToolCall

Solver = Callable[[Task, HiddenTests, int], Generator[ToolCall, str, None]]
"""Task, its hidden tests and a seed -> the calls, one a turn; it is sent each observation."""

_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
MARGIN = 10
"""Lines to view around a hunk."""


@dataclass(slots=True)
class Hunk:
    """One changed place. Texts keep their line ends."""

    start: int
    old: str = ""
    new: str = ""


@dataclass(slots=True)
class FileChange:
    """The changes of one file; `plain` is False for what hunks alone do not say (renames, modes, binary files)."""

    path: str
    created: bool = False
    deleted: bool = False
    plain: bool = True
    hunks: list[Hunk] = field(default_factory=list)


def read_patch(patch: str) -> list[FileChange]:
    """The changes in a unified diff of git."""
    changes: list[FileChange] = []
    for section in re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE):
        if section.startswith("diff --git "):
            changes.append(_read_section(section))
    return changes


def _read_section(section: str) -> FileChange:
    lines = section.split("\n")
    change = FileChange(lines[0].rpartition(" b/")[2])
    at = 0
    while at < len(lines) and not lines[at].startswith("@@"):
        change.created |= lines[at].startswith("new file mode")
        change.deleted |= lines[at].startswith("deleted file mode")
        marks = ("rename ", "copy ", "old mode", "GIT binary", "Binary files", "new file mode 1007", "new file mode 12")
        change.plain &= not lines[at].startswith(marks)
        at += 1
    for line in lines[at:]:
        _read_line(change, line)
    return change


def _read_line(change: FileChange, line: str) -> None:
    started = _HUNK.match(line)
    if started:
        change.hunks.append(Hunk(int(started[1])))
        return
    hunk = change.hunks[-1]
    if line.startswith("\\"):  # the line before it has no line feed
        hunk.old, hunk.new = hunk.old.removesuffix("\n"), hunk.new.removesuffix("\n")
        change.plain = change.created
    if line[:1] in (" ", "-"):
        hunk.old += line[1:] + "\n"
    if line[:1] in (" ", "+"):
        hunk.new += line[1:] + "\n"


def gold_solver(task: Task, hidden: HiddenTests, seed: int) -> Generator[ToolCall, str, None]:
    """Apply the gold patch with the tools: look at each place, replace it, submit."""
    for change in read_patch(hidden.gold_patch):
        yield from _solve_file(change, hidden.gold_patch)
    yield ToolCall("finish", {})


def _solve_file(change: FileChange, patch: str) -> Iterator[ToolCall] | Generator[ToolCall, str, None]:
    if not change.plain or (not change.created and not change.deleted and not all(h.old for h in change.hunks)):
        yield _apply_part(change.path, patch)
    elif change.deleted:
        yield ToolCall("execute_bash", {"cmd": f"rm {_quoted(change.path)}"})
    elif change.created:
        text = "".join(hunk.new for hunk in change.hunks)
        yield ToolCall("file_editor", {"command": "create", "path": change.path, "file_text": text})
    else:
        yield from _solve_hunks(change, patch)


def _solve_hunks(change: FileChange, patch: str) -> Generator[ToolCall, str, None]:
    shift = 0
    for hunk in change.hunks:
        first = max(1, hunk.start + shift - MARGIN)
        last = hunk.start + shift + hunk.old.count("\n") + MARGIN
        seen = {"command": "view", "path": change.path, "view_range": f"[{first}, {last}]"}
        yield ToolCall("file_editor", seen)
        edit = {"command": "str_replace", "path": change.path, "old_str": hunk.old, "new_str": hunk.new}
        answer = yield ToolCall("file_editor", edit)
        if not answer.startswith("Edited "):
            yield ToolCall("execute_bash", {"cmd": f"git checkout -q -- {_quoted(change.path)}"})
            yield _apply_part(change.path, patch)
            return
        shift += hunk.new.count("\n") - hunk.old.count("\n")


def _apply_part(path: str, patch: str) -> ToolCall:
    """Apply the part of the patch about one file, where single edits do not do."""
    sections = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    part = next(section for section in sections if section.split("\n")[0].rpartition(" b/")[2] == path)
    return ToolCall("execute_bash", {"cmd": f"git apply --whitespace=nowarn <<'END_OF_PATCH'\n{part}\nEND_OF_PATCH"})


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def no_op_solver(task: Task, hidden: HiddenTests, seed: int) -> Generator[ToolCall, str, None]:
    """Submit at once."""
    yield ToolCall("finish", {})
