"""Issue texts of commits: what its author wrote, cleaned of what gives the solution away, and a failing case."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from deepswe.tasks.synth.commits_select import Candidate

MIN_WORDS = 3
_MIN_QUOTE = 12
_TRAILER = re.compile(
    r"^(?:[A-Z][A-Za-z]*-)+[Bb]y:|^(?:Change-Id|Cc|Refs?|PR|Pull request|Generated with|🤖)\b", re.IGNORECASE
)
_REFERENCE = re.compile(
    r"\s*\(?(?:(?:fix(?:e[sd])?|close[sd]?|resolve[sd]?|refs?|see|issue|pr|gh)[\s:]*)?(?:#|gh-)\d+\)?|https?://\S+",
    re.IGNORECASE,
)
_ABOUT_TESTS = re.compile(
    r"\b(?:tests?|tested|testing|pytest|coverage|changelog|release notes|typos?)\b", re.IGNORECASE
)
_ACTION = re.compile(
    r"^(?:(?:bug)?fix(?:e[sd])?|feat|refactor|chore|perf|style|docs?)(?:\([^)]*\))?!?\s*:\s*", re.IGNORECASE
)


def message_text(message: str, candidate: Candidate, failing: Sequence[str], patch: str) -> str:
    """What is left of a commit message for an issue; "" if that is less than a sentence.

    Lines that name a test, a test file or a line of the patch, or speak of tests, are left out, and so are references
    and trailers.

    Args:
        message: of the commit.
        candidate: whose files are not named.
        failing: ids of the tests that a solution must make pass.
        patch: the solution.
    """
    kept = []
    for line in message.splitlines():
        text = _REFERENCE.sub("", _ACTION.sub("", line)).rstrip()
        if _TRAILER.match(line) or (line.strip() and not text.strip(" -*.,:;()")):
            continue
        if _ABOUT_TESTS.search(text) or leaks(text, candidate, failing, patch):
            continue
        kept.append(text)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    return text if len(re.findall(r"[A-Za-z]{2,}", text)) >= MIN_WORDS else ""


def leaks(text: str, candidate: Candidate, failing: Sequence[str], patch: str) -> str:
    """What a text gives away: a test's name, a file of tests or a line of the patch; "" if nothing.

    Args:
        text: of an issue.
        candidate, failing, patch: as for `message_text`.
    """
    names = {part.partition("[")[0] for test in failing for part in test.split("::")[1:]}
    files = {change.path for change in candidate.tests} | {c.path.rpartition("/")[2] for c in candidate.tests}
    for word in sorted(names | files, key=len, reverse=True):
        if re.search(rf"(?<![\w/]){re.escape(word)}(?!\w)", text):
            return word
    words = " ".join(text.split())
    for line in patch.splitlines():
        quote = " ".join(line[1:].split())
        if line.startswith("+") and not line.startswith("+++") and len(quote) >= _MIN_QUOTE and quote in words:
            return quote
    return ""


def compose(words: str, case: str) -> str:
    """An issue out of an author's words and a failing case, either of which may be missing."""
    return "\n\n".join(part.strip() for part in (words, case) if part.strip()) + "\n"


def hidden_names(texts: Mapping[str, str]) -> tuple[str, ...]:
    """Names of modules that only tests can import: those of the test files."""
    return tuple(sorted({path.rpartition("/")[2].removesuffix(".py") for path in texts} | {"tests", "test"}))
