"""When two patches are the same: the lines that they take away and put in, file by file."""

from __future__ import annotations

import hashlib
import re

_FILE = re.compile(r"diff --git (.*)")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_HEADERS = ("old mode", "new mode", "deleted file mode", "new file mode", "rename ", "copy ", "Binary files", "GIT ")


def normalise(patch: str) -> str:
    """A text that is equal for patches which make the same edits.

    Kept are the files, in the order of their names, with new names and modes, and the lines that are removed and
    added. Left out is what depends on how the diff was made: blob hashes, line numbers, the words after `@@`, the
    amount of context, blanks at the ends of lines.

    Args:
        patch: a unified diff, as git or `diff -u` write it; "" is the patch that does nothing.
    """
    files: dict[str, list[str]] = {}
    kept: list[str] = []
    removed = added = 0  # lines that the hunk still has
    is_git = False
    for line in patch.splitlines():
        if removed > 0 or added > 0:
            removed -= not line.startswith(("+", "\\"))
            added -= not line.startswith(("-", "\\"))
            if line.startswith(("+", "-")):
                kept.append(line.rstrip())
        elif hunk := _HUNK.match(line):
            removed, added = (1 if count is None else int(count) for count in hunk.groups())
        elif started := _FILE.match(line):
            kept, is_git = files.setdefault(started[1], []), True
        elif line.startswith("+++ ") and not is_git:
            kept = files.setdefault(line[4:].split("\t")[0].rstrip(), [])
        elif line.startswith(_HEADERS):
            kept.append(line.rstrip())
    return "\n".join("\n".join([name, *files[name]]) for name in sorted(files) if files[name])


def patch_key(patch: str) -> str:
    """A short name of `normalise(patch)`."""
    return hashlib.sha256(normalise(patch).encode("utf-8", "surrogatepass")).hexdigest()[:16]
