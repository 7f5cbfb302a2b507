"""Which part of a patch is applied, and which patches are not applied at all.

What steers a test run stays as the task has it: test files, whatever lies in a test directory, configuration of test
runners, and files that Python or pytest run by themselves. A patch may touch those only where the gold patch does. git
itself matches the names (`git apply --include/--exclude`), so no way of writing a name in a diff gets around it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from deepswe.tasks.task import HiddenTests

CONFIGURATION = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
)
"""Names of files that steer a test run."""
SELF_RUNNING = ("sitecustomize.py", "usercustomize.py", "*.pth", "*.dist-info/*", "*.egg-info/*", "*.egg-link")
"""Patterns of files that Python, or pytest by way of entry points, runs without being asked."""
TEST_DIRECTORIES = ("test", "tests")
"""Directories whose files a patch may not touch."""
MAX_PATCH_BYTES = 16 << 20
LARGE_PATCH_BYTES = 1 << 20
"""A patch below this, without binary parts, cannot be what filled a disk."""

_PLAIN_MODES = ("100644", "100755")
_LINK_MODE = "120000"
_MODE_LINE = re.compile(r"^(new file mode|new mode|old mode|deleted file mode|index [0-9a-f]+\.\.[0-9a-f]+) ?(.*)$")
_NAME_LINE = re.compile(r"^(?:--- |\+\+\+ |rename from |rename to |copy to )(.+?)\t?$")
_MACHINE_WORDS = re.compile(
    r": (?:Input/output error|Read-only file system|Cannot allocate memory|Resource temporarily unavailable)$"
    r"|^fatal: (?:[Oo]ut of memory|cannot fork)",
    re.MULTILINE,
)
"""What git says when the machine fails. Names of files, which a patch may choose, never end a line or begin one."""
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}


def apply_options(hidden: HiddenTests) -> list[str]:
    """Options of `git apply` under which it applies only what a patch may touch. The first match decides."""
    tests = {test.split("::")[0] for test in hidden.fail_to_pass + hidden.pass_to_pass} | set(hidden.files)
    tests |= touched_paths(hidden.test_patch)
    options = [f"--exclude={_literal(path)}" for path in sorted(tests)]
    options += [f"--exclude={pattern}" for pattern in hidden.protected]
    options += [f"--include={_literal(path)}" for path in sorted(touched_paths(hidden.gold_patch))]
    for pattern in protected_patterns():
        options += [f"--exclude={pattern}", f"--exclude=*/{pattern}"]
    return [*options, "--include=*"]


def protected_patterns() -> Iterator[str]:
    """Patterns of names, below any directory, that stay as the task has them."""
    yield from CONFIGURATION
    yield from SELF_RUNNING
    for name in TEST_DIRECTORIES:
        yield from (name, f"{name}/*")


@functools.lru_cache(maxsize=1024)
def is_protected(path: str) -> bool:
    """Whether a path is one that a patch may touch only where the gold patch does; hidden test files aside."""
    parts = path.split("/")
    if parts[-1] in CONFIGURATION or any(part in TEST_DIRECTORIES for part in parts):
        return True
    return any(PurePosixPath("/" + path).match(pattern) for pattern in SELF_RUNNING)


def refusal(patch: str, hidden: HiddenTests) -> str:
    """Why a patch is not applied at all, or ""."""
    size, most = len(patch), max(MAX_PATCH_BYTES, 4 * len(hidden.gold_patch))
    if size > most:
        return f"it has {size} characters, more than the {most} that are taken"
    if not touched_paths(patch):
        return "it names no file"
    allowed = set(_sections(hidden.gold_patch)) if _LINK_MODE in hidden.gold_patch else set()
    for section in _sections(patch):
        if section not in allowed and (reason := _refused_section(section)):
            return reason
    return ""


def _sections(patch: str) -> list[str]:
    return re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)


def _refused_section(section: str) -> str:
    """Only regular files and links that stay inside the tree are applied."""
    link = False
    for line in section.split("\n"):
        if line.startswith(("@@", "GIT binary patch")):
            break
        found = _MODE_LINE.match(line)
        if found is None or found[2] in ("", *_PLAIN_MODES):
            continue
        if found[2] != _LINK_MODE or found[1] == "new mode":
            return f"it makes something that is no regular file (mode {found[2]!r})"
        link = link or not found[1].startswith(("deleted", "old"))
    return _refused_link(section) if link else ""


def _refused_link(section: str) -> str:
    lines = section.split("\n")
    starts = [number for number, line in enumerate(lines) if line.startswith("@@")]
    if not starts:
        return "it makes a symbolic link without a readable target"
    paths = touched_paths(section)
    targets = [line[1:] for line in lines[starts[0] :] if line.startswith("+")]
    for path in paths:
        for target in targets:
            if not _stays_inside(path, target):
                return f"it makes a symbolic link out of the tree ({path} to {target!r})"
    return ""


def _stays_inside(path: str, target: str) -> bool:
    """Whether a link can only lead into the tree: up at first, by no more than it lies deep, then down."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    down = parts[up:]
    return not target.startswith("/") and up <= path.count("/") and ".." not in down and ".git" not in down


def touched_paths(patch: str) -> set[str]:
    """The paths that a unified diff names, as far as its headers say them plainly."""
    found = set()
    for line in patch.split("\n"):
        if line.startswith("diff --git "):
            found |= _header_paths(line[len("diff --git ") :])
        elif (named := _NAME_LINE.match(line)) and named[1] != "/dev/null":
            path = unquote(named[1])
            found.add(path if line.startswith(("rename", "copy")) else path.partition("/")[2])
    return found - {""}


def _header_paths(names: str) -> set[str]:
    quoted = re.fullmatch(r'("(?:[^"\\]|\\.)*"|\S+) ("(?:[^"\\]|\\.)*"|\S+)', names)
    if quoted:
        return {unquote(name).partition("/")[2] for name in quoted.groups()}
    same = re.fullmatch(r"a/(.+) b/\1", names)
    return {same[1]} if same else set()


def unquote(name: str) -> str:
    """A name as git writes it, without its quotes and escapes."""
    if not (name.startswith('"') and name.endswith('"') and len(name) > 1):
        return name
    data = bytearray()
    for plain, octal, letter in re.findall(r"([^\\]+)|\\([0-7]{3})|\\(.)", name[1:-1]):
        data += plain.encode("utf-8", "surrogateescape")
        if octal:
            data.append(int(octal, 8) & 0xFF)
        elif letter:
            data.append(_ESCAPES.get(letter, ord("?")))
    return data.decode("utf-8", "surrogateescape")


def can_fill_disk(patch: str) -> bool:
    """Whether a patch may need so much room that a full disk is its own doing."""
    return len(patch) >= LARGE_PATCH_BYTES or "GIT binary patch" in patch


def is_machine_failure(words: str) -> bool:
    """Whether what git printed says that the machine failed, and not the patch."""
    return _MACHINE_WORDS.search(words) is not None


def _literal(path: str) -> str:
    """A path as a pattern of git that matches it alone."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", path)
