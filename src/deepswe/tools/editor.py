"""The tool that shows and changes files. It works on our side of the sandbox: no process starts for a file."""

from __future__ import annotations

import posixpath
from typing import Literal

from deepswe.tools.declare import Edit, ToolResult, Workspace, tool
from deepswe.tools.listing import list_directory
from deepswe.tools.output import KEPT_CHARACTERS, plural, shorten

CONTEXT_LINES = 4
"""Lines shown on each side of an edit."""

Command = Literal["view", "create", "str_replace", "insert", "undo_edit"]


@tool
async def file_editor(
    workspace: Workspace,
    command: Command,
    path: str,
    file_text: str | None = None,
    old_str: str | None = None,
    new_str: str | None = None,
    insert_line: int | None = None,
    view_range: list[int] | None = None,
    concise: bool = False,
) -> ToolResult:
    """View, create and edit files. Text values are exact: every space and line break between the tags counts.

    Args:
        command: view shows a file with line numbers, or a directory to depth 2; create writes a whole file;
            str_replace replaces the one place where old_str stands; insert adds lines; undo_edit takes back the last
            edit of the file.
        path: file or directory, relative to the repository or absolute.
        file_text: for create: the whole content.
        old_str: for str_replace: the text to replace, without line numbers. It must occur exactly once in the file.
        new_str: for str_replace: the text to put there; leave it out to delete. For insert: the lines to add.
        insert_line: for insert: the line after which the text goes; 0 is the top of the file.
        view_range: for view: first and last line; -1 as last is the end of the file.
        concise: for edits: do not show the lines around the change.
    """
    if command == "view":
        return await _view(workspace, path, view_range)
    if command == "create":
        return await _create(workspace, path, file_text)
    if command == "undo_edit":
        return await _undo(workspace, path)
    loaded = await _load(workspace, path)
    if isinstance(loaded, ToolResult):
        return loaded
    text = Text(loaded)
    if command == "str_replace":
        changed = replace_once(text, path, old_str, new_str or "")
    else:
        changed = insert_lines(text, path, insert_line, new_str)
    if isinstance(changed, ToolResult):
        return changed
    after, first, last = changed
    failed = await _save(workspace, path, Edit(loaded, text.encode(after)))
    if failed:
        return failed
    shown = "" if concise else "\n" + number_lines(after, first - CONTEXT_LINES, last + CONTEXT_LINES)
    return ToolResult(f"Edited {path}{shown}")


class Text:
    """A file's bytes as text that goes back to the same bytes.

    Bytes that are not UTF-8 ride along as lone surrogates. Where every line ends in CRLF, the text has plain line
    feeds and gets them back; a file with mixed ends is left as it is.
    """

    def __init__(self, data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        self.crlf = "\r\n" in text and text.count("\n") == text.count("\r\n")
        self.content = text.replace("\r\n", "\n") if self.crlf else text

    def encode(self, content: str) -> bytes:
        """The bytes of changed content, in the file's own line ends."""
        if self.crlf:
            content = content.replace("\n", "\r\n")
        return content.encode("utf-8", "surrogateescape")


def show(text: str) -> str:
    """Text without lone surrogates: a byte that is not UTF-8 shows as ``\\xNN``."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def split_lines(text: str) -> list[str]:
    """The lines, without their line feeds; a last line needs none."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def number_lines(text: str, first: int, last: int) -> str:
    """Lines `first` to `last` (1-based, clipped to the text), each as number, tab, line."""
    lines = split_lines(text)
    first, last = max(first, 1), min(last, len(lines))
    return show("\n".join(f"{number}\t{lines[number - 1]}" for number in range(first, last + 1)))


def replace_once(text: Text, path: str, old: str | None, new: str) -> tuple[str, int, int] | ToolResult:
    """New content and its first and last changed line, or the mistake."""
    if old is None or old == "":
        return ToolResult("str_replace needs old_str: the exact text to replace.", "missing_parameter")
    if text.crlf:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if old == new:
        return ToolResult("old_str and new_str are the same; nothing changed. Give the new text.", "no_change")
    content = text.content
    starts = _occurrences(content, old)
    if not starts:
        return ToolResult(f"No match for old_str in {path}. View the file and copy the text exactly.", "no_match")
    if len(starts) > 1:
        numbers = ", ".join(str(content.count("\n", 0, start) + 1) for start in starts[:10])
        return ToolResult(
            f"old_str occurs {len(starts)} times in {path}, at lines {numbers}. "
            "Add lines around it until it is unique.",
            "several_matches",
        )
    start = starts[0]
    first = content.count("\n", 0, start) + 1
    return content[:start] + new + content[start + len(old) :], first, first + new.rstrip("\n").count("\n")


def _occurrences(content: str, wanted: str) -> list[int]:
    """Where `wanted` starts, overlapping places included."""
    starts, start = [], content.find(wanted)
    while start >= 0:
        starts.append(start)
        start = content.find(wanted, start + 1)
    return starts


def insert_lines(text: Text, path: str, after: int | None, new: str | None) -> tuple[str, int, int] | ToolResult:
    """New content and its first and last changed line, or the mistake."""
    if after is None or new is None:
        name = "insert_line" if after is None else "new_str"
        return ToolResult(f"insert needs the parameter {name}.", "missing_parameter")
    lines = text.content.split("\n")
    count = len(split_lines(text.content))
    if not 0 <= after <= count:
        return ToolResult(f"insert_line {after} is not in {path}; use 0 to {count}.", "bad_range")
    added = split_lines(new.replace("\r\n", "\n") if text.crlf else new) or [""]
    ends = [""] if after == len(lines) else lines[after:]
    return "\n".join([*lines[:after], *added, *ends]), after + 1, after + len(added)


async def _load(workspace: Workspace, path: str) -> bytes | ToolResult:
    """A file's bytes, or why the model cannot have them."""
    try:
        return await workspace.sandbox.read_file(workspace.resolve(path))
    except FileNotFoundError:
        return ToolResult(f"{path} does not exist. View the directory {_parent(path)} to see what does.", "no_path")
    except NotADirectoryError:
        return ToolResult(f"{path} does not exist: a part of it is a file. View the directory . first.", "no_path")
    except IsADirectoryError:
        return ToolResult(f"{path} is a directory. Give the path of a file.", "is_directory")
    except PermissionError:
        return ToolResult(f"{path} may not be read. Work inside the repository.", "not_permitted")
    except ValueError as error:
        return ToolResult(f"{path} cannot be opened here: {error}. Use execute_bash.", "unreadable")
    except OSError as error:
        return ToolResult(f"{path} cannot be read: {error.strerror or error}.", "unreadable")


async def _save(workspace: Workspace, path: str, edit: Edit) -> ToolResult | None:
    """Write a file and remember the edit; the mistake if it cannot be written."""
    target = workspace.resolve(path)
    try:
        await workspace.sandbox.write_files({target: edit.after})
    except OSError as error:
        return ToolResult(f"{path} cannot be written: {error.strerror or error}. Nothing changed.", "not_written")
    workspace.edits.setdefault(target, []).append(edit)
    return None


async def _view(workspace: Workspace, path: str, view_range: list[int] | None) -> ToolResult:
    loaded = await _load(workspace, path)
    if isinstance(loaded, ToolResult):
        if loaded.error != "is_directory":
            return loaded
        if view_range is not None:
            return ToolResult(f"{path} is a directory; view it without view_range.", "bad_range")
        return ToolResult(shorten(await list_directory(workspace, path), lines=200))
    if b"\0" in loaded:
        return ToolResult(f"{path} is a binary file of {len(loaded)} bytes.", "binary_file")
    text = Text(loaded).content
    count = len(split_lines(text))
    if not count:
        return ToolResult(f"{path} is empty.")
    if view_range is None:
        view_range = [1, count]
    if len(view_range) != 2:
        return ToolResult("view_range must be two numbers, first and last line, such as [1, 20].", "bad_range")
    first, last = view_range[0], count if view_range[1] == -1 else view_range[1]
    if not 1 <= first <= count or last < first:
        return ToolResult(f"view_range {view_range} is not in {path}; it has lines 1 to {count}.", "bad_range")
    last = min(last, count)
    shown = _fit(number_lines(text, first, last), last)
    if last == count and not text.endswith("\n"):
        shown += "\n[no line break at the end of the file]"
    return ToolResult(shown)


def _fit(shown: str, last: int) -> str:
    """Numbered lines, cut at a line's end where they are too many characters."""
    if len(shown) <= KEPT_CHARACTERS:
        return shown
    cut = shown.rfind("\n", 0, KEPT_CHARACTERS)
    if cut < 0:
        return shorten(shown)
    next_line = int(shown[cut + 1 :].partition("\t")[0])
    return f"{shown[:cut]}\n[lines {next_line} to {last} left out: view them with view_range]"


async def _create(workspace: Workspace, path: str, file_text: str | None) -> ToolResult:
    if file_text is None:
        return ToolResult("create needs file_text: the whole content of the file.", "missing_parameter")
    loaded = await _load(workspace, path)
    if isinstance(loaded, ToolResult):
        if loaded.error != "no_path":
            return loaded
        before = None
    else:
        before = loaded
    failed = await _save(workspace, path, Edit(before, file_text.encode("utf-8", "surrogateescape")))
    if failed:
        return failed
    if before is None:
        return ToolResult(f"Created {path}")
    return ToolResult(f"Overwrote {path}, which had {plural(len(split_lines(Text(before).content)), 'line')}")


async def _undo(workspace: Workspace, path: str) -> ToolResult:
    target = workspace.resolve(path)
    if not workspace.edits.get(target):
        return ToolResult(f"There is no edit of {path} to undo.", "nothing_to_undo")
    loaded = await _load(workspace, path)
    edit = workspace.edits[target][-1]
    if loaded != edit.after:
        return ToolResult(f"{path} has changed since its last edit; nothing was undone.", "changed_since")
    if edit.before is None:
        await workspace.sandbox.exec(["rm", "-f", "--", target], timeout_s=workspace.timeout_s)
    else:
        try:
            await workspace.sandbox.write_files({target: edit.before})
        except OSError as error:
            return ToolResult(f"{path} cannot be written: {error.strerror or error}. Nothing changed.", "not_written")
    workspace.edits[target].pop()
    return ToolResult(f"Removed {path}" if edit.before is None else f"Undid the last edit of {path}")


def _parent(path: str) -> str:
    return posixpath.dirname(path.rstrip("/")) or "."
