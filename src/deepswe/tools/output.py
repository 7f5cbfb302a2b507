"""How much of an output the model sees, and in which form."""

from __future__ import annotations

KEPT_LINES = 40
"""Lines kept at each end of a long output."""
KEPT_CHARACTERS = 10_000
"""Characters kept of a long output, half at each end."""


def shorten(text: str, *, lines: int = KEPT_LINES, characters: int = KEPT_CHARACTERS) -> str:
    """The first and last `lines` lines and at most `characters` characters, saying how much is left out."""
    rows = text.split("\n")
    trailing = rows[-1] == ""
    count = len(rows) - trailing
    if count > 2 * lines:
        last = rows[count - lines : count] + ([""] if trailing else [])
        text = "\n".join([*rows[:lines], f"[{count - 2 * lines} lines left out]", *last])
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return text


def printable(data: bytes) -> str:
    """Bytes as text; what is not UTF-8 shows as ``\\xNN``."""
    return data.decode("utf-8", "backslashreplace")


def plural(count: int, noun: str) -> str:
    """`1 line`, `2 lines`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
