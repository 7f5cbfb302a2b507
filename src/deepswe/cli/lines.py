"""Single lines on stderr: whatever a text from a file holds, it is one line and moves no cursor."""

from __future__ import annotations

import sys

from deepswe.analysis.harmless import harmless


def one_line(text: str) -> str:
    """The text as one line in which nothing is invisible or controls a terminal."""
    return harmless("; ".join(filter(None, map(str.strip, text.splitlines()))))


def warn(text: str) -> None:
    """Print it on stderr as one line."""
    print(one_line(text), file=sys.stderr)
