"""Unified diffs as text: the paths they name, their reverse, and their content without places."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

_TOUCHED = re.compile(r"^(?:--- a/|\+\+\+ b/|rename from |rename to )(.+?)\t?$", re.MULTILINE)
_HEADER = re.compile(r"^diff --git a/(.+) b/\1$", re.MULTILINE)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")


def lines_of(text: str) -> list[str]:
    """The lines with their ends; only a line feed ends a line, as git has it."""
    *whole, rest = text.split("\n")
    return [f"{line}\n" for line in whole] + ([rest] if rest else [])


def touched_paths(patch: str) -> set[str]:
    """The paths that a unified diff names."""
    return set(_TOUCHED.findall(patch)) | set(_HEADER.findall(patch))


def read_diff(patch: str) -> Iterator[tuple[str, str]]:
    """The lines of a unified diff as (sign, text): "-", "+" or " " inside a hunk, "" outside of all hunks.

    Hunks are as long as they say, so an edit that looks like a header is an edit.
    """
    old = new = 0
    for line in patch.split("\n"):
        if old > 0 or new > 0:
            sign = line[:1] or " "
            old -= sign in ("-", " ")
            new -= sign in ("+", " ")
            if sign in ("-", "+", " "):
                yield sign, line[1:]
        else:
            if hunk := _HUNK.match(line):
                old, new = int(hunk[2] or 1), int(hunk[4] or 1)
            yield "", line


def changed_lines(patch: str) -> Iterator[tuple[str, str]]:
    """The lines that a unified diff takes out and puts in, in order, as ("-" or "+", text)."""
    return ((sign, text) for sign, text in read_diff(patch) if sign in ("-", "+"))


def reverse_patch(patch: str) -> str:
    """The unified diff that takes another one back. Text only.

    Raises:
        ValueError: it renames, copies, changes modes or is binary, or it has no hunk.
    """
    out: list[str] = []
    minus = ""
    hunks = old = new = 0
    for line in lines_of(patch):
        if old > 0 or new > 0 or line.startswith("\\"):
            sign = line[:1]
            old -= sign in ("-", " ", "\n")
            new -= sign in ("+", " ", "\n")
            out.append({"-": "+", "+": "-"}.get(sign, sign) + line[1:])
        elif hunk := _HUNK.match(line):
            old, new = int(hunk[2] or 1), int(hunk[4] or 1)
            before, after = (_span(hunk[1], hunk[2]), _span(hunk[3], hunk[4]))
            out.append(f"@@ -{after} +{before} @@{hunk[5]}\n")
            hunks += 1
        elif line.startswith("--- "):
            minus = line[4:]
        elif line.startswith("+++ "):
            out += [f"--- {_side(line[4:], 'a')}", f"+++ {_side(minus, 'b')}"]
        elif line.startswith("new file mode "):
            out.append(line.replace("new file", "deleted file"))
        elif line.startswith("deleted file mode "):
            out.append(line.replace("deleted file", "new file"))
        elif line.startswith(("rename ", "copy ", "old mode ", "new mode ", "GIT binary", "Binary files")):
            raise ValueError(f"a diff with {line.strip()!r} is not reversed here")
        elif line.startswith("diff --git "):
            out.append(line)
    if not hunks:
        raise ValueError("the diff has no hunk")
    return "".join(out)


def _span(start: str, count: str | None) -> str:
    return start if count is None else f"{start},{count}"


def _side(name: str, side: str) -> str:
    return name if name.startswith("/dev/null") else f"{side}/{name[2:]}"


def diff_files(before: str, after: str, path: str) -> str:
    """The unified diff of one file; "" where nothing differs.

    Args:
        before, after: its text; "" for a file that is not there.
        path: relative to the root.
    """
    if before == after:
        return ""
    head = f"diff --git a/{path} b/{path}\n"
    if not before:
        head += "new file mode 100644\n"
    if not after:
        head += "deleted file mode 100644\n"
    names = (f"a/{path}" if before else "/dev/null", f"b/{path}" if after else "/dev/null")
    lines = difflib.unified_diff(lines_of(before), lines_of(after), *names)
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
