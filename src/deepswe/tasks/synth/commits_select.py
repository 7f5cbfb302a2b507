"""Which commits may become tasks: small ones that change code and tests. Nothing is run here.

The limits are those of R2E-Gym's SWE-GEN: fewer than 5 files and fewer than 200 edited lines outside the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepswe.tasks.bundled import is_test_module
from deepswe.tasks.synth.commits_history import Change, Commit

TEST_DIRECTORIES = frozenset({"test", "tests"})
SETTINGS = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml", "setup.py"}
)
"""Files that steer a build or a test run: no part of a solution."""
_ASIDE = frozenset({"doc", "docs", "example", "examples", "benchmark", "benchmarks", "scripts", "ci", ".github"})
"""Top directories whose files are not the code."""
_ASIDE_FILES = frozenset({"noxfile.py", "conf.py", "tasks.py", "fabfile.py"})

ReadText = Callable[[str], str | None]
"""Id of a content -> its text, or None where it is no text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a commit may change at most.

    Attributes:
        files, lines: fewer than this many outside the tests; lines are those added and those deleted.
    """

    files: int = 5
    lines: int = 200


@dataclass(frozen=True, slots=True)
class Candidate:
    """A commit that may become a task.

    Attributes:
        commit: it.
        code: its changes that a solution must make.
        tests: its changes to tests and to what they lean on.
    """

    commit: Commit
    code: tuple[Change, ...]
    tests: tuple[Change, ...]

    @property
    def lines(self) -> int:
        """Edited lines outside the tests."""
        return sum(change.added + change.deleted for change in self.code)


def is_test_path(path: str) -> bool:
    """Whether a file is a test or lies among tests."""
    *directories, name = path.split("/")
    return bool(TEST_DIRECTORIES.intersection(directories)) or is_test_module(path) or name == "conftest.py"


def is_code_path(path: str) -> bool:
    """Whether a file belongs to the code: a Python file, or data beside it."""
    *directories, name = path.split("/")
    if is_test_path(path) or name in SETTINGS or (directories and directories[0] in _ASIDE):
        return False
    if not directories:
        return name.endswith(".py") and name not in _ASIDE_FILES
    return not directories[0].startswith(".")


def select(commit: Commit, limits: Limits, read: ReadText) -> Candidate | str:
    """The candidate that a commit is, or why it is none.

    Args:
        commit: with its changes.
        limits: on their size.
        read: reads contents, of code files only.
    """
    if not commit.parents:
        return "first commit"
    if not commit.changes:
        return "merge" if len(commit.parents) > 1 else "no change"
    code = tuple(change for change in commit.changes if is_code_path(change.path))
    tests = tuple(change for change in commit.changes if is_test_path(change.path))
    if not any(change.path.endswith(".py") for change in code):
        return "no code change"
    if not any(change.after for change in tests):
        return "no test change"
    if any(change.binary or change.special for change in (*code, *tests)):
        return "binary file or link"
    candidate = Candidate(commit, code, tests)
    if len(code) >= limits.files:
        return "too many files"
    if candidate.lines >= limits.lines:
        return "too many lines"
    return _read_through(candidate, read)


def _read_through(candidate: Candidate, read: ReadText) -> Candidate | str:
    """Whether the code files can be read, and do something else than before."""
    different = False
    for change in candidate.code:
        before, after = (read(ident) if ident else "" for ident in (change.before, change.after))
        if before is None or after is None:
            return "no UTF-8"
        try:
            different |= not change.path.endswith(".py") or _meaning(before) != _meaning(after)
        except (SyntaxError, ValueError, RecursionError):
            return "no Python 3"
    return candidate if different else "only comments or documentation"


def _meaning(text: str) -> str:
    """The syntax tree without places and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _documented(body):
            node.body = node.body[1:]
    return ast.dump(tree)


def _documented(body: object) -> bool:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *_]:
            return True
        case _:
            return False


def files_to_run(candidate: Candidate, files: Sequence[str], most: int = 40) -> tuple[str, ...]:
    """The test modules that a candidate's tests are in.

    Args:
        candidate: whose.
        files: all paths of the new tree.
        most: where only data of tests changed, the modules beside the data are run, if these are no more than this.

    Returns:
        Sorted paths; empty where there is none to run.
    """
    modules = sorted(c.path for c in candidate.tests if c.after and is_test_module(c.path))
    if modules:
        return tuple(modules)
    roots = {_test_root(change.path) for change in candidate.tests if change.after}
    beside = sorted(path for path in files if is_test_module(path) and _test_root(path) in roots)
    return tuple(beside) if len(beside) <= most else ()


def _test_root(path: str) -> str:
    """The directory of tests that a path lies in."""
    directories = path.split("/")[:-1]
    depth = next((at for at, name in enumerate(directories) if name in TEST_DIRECTORIES), len(directories) - 1)
    return "/".join(directories[: depth + 1])
