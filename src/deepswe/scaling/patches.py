"""When two patches are the same: the lines that they take away and put in, file by file."""

from __future__ import annotations

import hashlib
import re

from deepswe.tasks.patches import read_diff

_FILE = re.compile(r"diff --git (.*)")
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
    is_git = is_binary = False
    for sign, line in read_diff(patch):
        if sign in ("-", "+"):
            kept.append((sign + line).rstrip())
        elif sign:
            continue
        elif started := _FILE.match(line):
            kept, is_git, is_binary = files.setdefault(started[1].rstrip(), []), True, False
        elif line.startswith("+++ ") and not is_git:
            kept = files.setdefault(line[4:].split("\t")[0].rstrip(), [])
        elif (is_binary and line) or line.startswith(_HEADERS):
            is_binary = is_binary or line.startswith("GIT binary patch")
            kept.append(line.rstrip())
    return "\n".join("\n".join([name, *files[name]]) for name in sorted(files) if files[name])


def patch_key(patch: str) -> str:
    """A short name of `normalise(patch)`; of the text itself where that is none of a diff."""
    return hashlib.sha256((normalise(patch) or patch.strip()).encode("utf-8", "surrogatepass")).hexdigest()[:16]
