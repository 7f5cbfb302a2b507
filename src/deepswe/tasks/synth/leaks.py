"""What an issue text must not give away: names of hidden tests and their files, and lines of the patch."""

from __future__ import annotations

import re
from collections.abc import Sequence

MIN_QUOTE = 12
"""Shorter lines of a patch, such as `return None`, occur everywhere and give nothing away."""


def leaks(text: str, failing: Sequence[str], test_files: Sequence[str], patch: str) -> tuple[str, ...]:
    """What a text gives away; empty if nothing.

    Args:
        text: of an issue.
        failing: ids of the hidden tests.
        test_files: paths of files with hidden tests.
        patch: the unified diff of the solution; both its added and its removed lines are secret.
    """
    found = [word for word in secret_names(failing, test_files) if _has_word(text, word)]
    words = " ".join(text.split())
    return (*found, *(line for line in secret_lines(patch) if line in words))


def secret_names(failing: Sequence[str], test_files: Sequence[str]) -> tuple[str, ...]:
    """Names of test functions, test classes and test files, the longest first."""
    names = {part.partition("[")[0] for test in failing for part in test.split("::")[1:]}
    for path in (*test_files, *(test.partition("::")[0] for test in failing)):
        names |= {path, path.rpartition("/")[2], path.rpartition("/")[2].removesuffix(".py")}
    return tuple(sorted((name for name in names if len(name) > 3), key=lambda name: (-len(name), name)))


def secret_lines(patch: str) -> tuple[str, ...]:
    """Changed lines of a patch that are long enough to be recognised, blanks squeezed."""
    lines = []
    for line in patch.splitlines():
        quote = " ".join(line[1:].split())
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---") and len(quote) >= MIN_QUOTE:
            lines.append(quote)
    return tuple(dict.fromkeys(lines))


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w/]){re.escape(word)}(?!\w)", text) is not None
