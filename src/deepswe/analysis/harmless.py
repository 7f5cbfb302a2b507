"""Any text, shown as text: nothing in it can hide, move or break what stands around it."""

from __future__ import annotations

import re

HEAD, TAIL = 0.75, 0.25

_TROUBLE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, so all terminal sequences; tab and line feed stay
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"  # drawn as nothing
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # zero width, line separators, direction marks
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\ud800-\udfff"  # lone surrogates cannot be encoded
    "\U000e0000-\U000e0fff"  # tags and variation selectors
    "]"
)


def harmless(text: str) -> str:
    """The text with every invisible, directional, control or unencodable character written out, such as ⟨U+202E⟩.

    The result can be encoded in UTF-8. It is text, not markup: a page still has to escape it.
    """
    return _TROUBLE.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def clip(text: str, *, characters: int = 12_000, line: int = 1_200) -> str:
    """The text at a length that a page can hold: first each line, then the whole keeps its beginning and its end.

    Args:
        characters: of the whole, about.
        line: characters of one line, about.
    """
    if len(text) > characters:
        text = _middle_out(text, characters, "\n", "\n")
    if len(text) <= line:
        return text
    return "\n".join(_middle_out(part, line, " ", " ") if len(part) > line else part for part in text.split("\n"))


def _middle_out(text: str, size: int, before: str, after: str) -> str:
    head, tail = int(size * HEAD), int(size * TAIL)
    return f"{text[:head]}{before}[{len(text) - head - tail:,} characters left out]{after}{text[len(text) - tail :]}"
