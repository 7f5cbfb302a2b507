"""Read a git repository: its history, the difference of a commit, the files of a tree. Never writes to it.

All but the first look goes through a git directory of our own that borrows the repository's objects, so that its
configuration, hooks, filters and index have no part in what is read, and nothing in it changes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from deepswe.errors import BuildError
from deepswe.tasks.layers import LayerCache, layer_key

_URL = re.compile(r"(?:https?|ssh|git|file)://[^\s]+|[\w.-]+@[\w.-]+:[^\s]+")
_CLONE_TIMEOUT_S = 1800.0
_TIMEOUT_S = 300.0
_PAGE = 200
_MISSING = "0" * 40
_LINK, _SUBMODULE = "120000", "160000"


@dataclass(frozen=True, slots=True)
class Change:
    """One path that a commit changes.

    Attributes:
        path: relative to the root.
        before, after: ids of its contents; "" where it is not there.
        added, deleted: lines; -1 for a binary file.
        special: it is or was a link or a submodule.
    """

    path: str
    before: str
    after: str
    added: int
    deleted: int
    special: bool = False

    @property
    def binary(self) -> bool:
        """Whether git takes it for binary."""
        return self.added < 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit and what it changes.

    Attributes:
        id: 40 hexadecimal digits.
        parents: ids.
        time: of the commit, not of its author.
        message: whole.
        changes: against the first parent; empty for a merge.
    """

    id: str
    parents: tuple[str, ...]
    time: datetime
    message: str
    changes: tuple[Change, ...] = ()


def open_source(source: str, cache: LayerCache) -> Path:
    """The directory of a repository that is named by path or URL; a URL is cloned into the cache once.

    Raises:
        BuildError: there is no repository there.
    """
    if not _URL.fullmatch(source):
        path = Path(source).expanduser()
        if not path.is_dir():
            raise BuildError(f"{source} is no directory and no URL of a git repository (https, ssh, git or file)")
        return path

    def clone(place: Path) -> None:
        command = ["git", "clone", "--quiet", "--bare", "--no-local", "--", source, str(place / "repository.git")]
        _run(command, {**_environment(), "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file"}, _CLONE_TIMEOUT_S)

    return cache.build(layer_key("clone", {"url": source}), clone) / "repository.git"


class History:
    """A repository that is read; a context, whose own git directory goes with it."""

    def __init__(self, repository: Path) -> None:
        """Name it.

        Args:
            repository: a working tree or a bare repository.
        """
        self.repository = repository
        self._place = Path()
        self._objects = ""

    def __enter__(self) -> Self:
        plain = ["git", "-c", "safe.directory=*", "-C", str(self.repository), "rev-parse"]
        found = _run([*plain, "--path-format=absolute", "--git-path", "objects"], _environment(), _TIMEOUT_S)
        self._objects = found.decode().strip()
        self._place = Path(tempfile.mkdtemp(prefix="deepswe-history-"))
        _run(["git", "init", "--quiet", "--bare", "--template=", str(self._git)], _environment(), _TIMEOUT_S)
        (self._git / "objects" / "info").mkdir(exist_ok=True)
        (self._git / "objects" / "info" / "alternates").write_text(self._objects + "\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _git(self) -> Path:
        return self._place / "own.git"

    def resolve(self, name: str) -> str:
        """The commit of a branch, a tag or an abbreviated id.

        Raises:
            BuildError: the repository has none of that name.
        """
        plain = ["git", "-c", "safe.directory=*", "-C", str(self.repository), "rev-parse", "--verify", "--quiet"]
        try:
            return _run([*plain, f"{name}^{{commit}}"], _environment(), _TIMEOUT_S).decode().strip()
        except BuildError as error:
            raise BuildError(f"{self.repository} has no commit {name!r}; name a branch, a tag or a commit") from error

    def walk(self, tip: str, *, first_parent: bool = False, limit: int = 0) -> Iterator[Commit]:
        """The commits that `tip` has grown from, newest first.

        Args:
            tip: a commit id.
            first_parent: follow first parents only, and see a merge as the change that it brings.
            limit: at most this many; 0 takes all.
        """
        options = ["--raw", "--numstat", "-z", "--no-renames", "--no-abbrev", "--format=%x01%H%x02%P%x02%ct%x02%B%x02"]
        options += ["--first-parent", "--diff-merges=first-parent"] if first_parent else []
        seen = 0
        while not limit or seen < limit:
            count = min(_PAGE, limit - seen) if limit else _PAGE
            text = self._text("log", *options, f"--skip={seen}", f"--max-count={count}", tip, "--")
            parts = text.split("\x01")[1:]
            yield from (_read_commit(part) for part in parts)
            seen += count
            if len(parts) < count:
                return

    def tree(self, commit: str) -> str:
        """Id of a commit's tree."""
        return self._text("rev-parse", f"{commit}^{{tree}}").strip()

    def files(self, tree: str) -> dict[str, tuple[str, str]]:
        """Path -> (mode, id of the content) of every file of a tree; submodules are left out."""
        rows = (line.partition("\t") for line in self._text("ls-tree", "-r", "-z", "--full-tree", tree).split("\0"))
        found = {path: (head.split()[0], head.split()[2]) for head, _, path in rows if path}
        return {path: row for path, row in found.items() if row[0] != _SUBMODULE}

    def blob(self, ident: str) -> bytes:
        """The content of that id."""
        return self._bytes("cat-file", "blob", ident)

    def text(self, ident: str) -> str | None:
        """The content of that id if it is UTF-8 without zero bytes, else None."""
        data = self.blob(ident)
        try:
            return None if b"\0" in data else data.decode()
        except UnicodeDecodeError:
            return None

    def check_out(self, tree: str, place: Path) -> None:
        """Make a directory that only this function fills hold that tree; quick where it holds a similar one."""
        place.mkdir(parents=True, exist_ok=True)
        index = self._place / hashlib.sha256(os.fsencode(place)).hexdigest()
        env = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(place)}
        self._bytes("-c", "core.autocrlf=false", "read-tree", "--reset", "-u", tree, env=env)

    def diff(self, before: str, after: str, paths: Sequence[str]) -> str:
        """The unified diff of some paths between two commits."""
        options = ["--no-ext-diff", "--no-textconv", "--no-renames", "--full-index", "--no-color"]
        return self._text("diff", *options, before, after, "--", *(f":(literal){path}" for path in paths))

    def mentions(self, tree: str, pattern: str) -> bool:
        """Whether a Python file of a tree has a line that matches an extended regular expression."""
        try:
            return bool(self._bytes("grep", "-l", "-E", "-e", pattern, tree, "--", "*.py"))
        except BuildError:
            return False

    def _text(self, *arguments: str) -> str:
        return self._bytes(*arguments).decode("utf-8", "surrogateescape")

    def _bytes(self, *arguments: str, env: Mapping[str, str] | None = None) -> bytes:
        whole = {**_environment(), "GIT_DIR": str(self._git), **(env or {})}
        return _run(["git", *arguments], whole, _TIMEOUT_S)


def _read_commit(part: str) -> Commit:
    ident, parents, seconds, message, rest = part.split("\x02", 4)
    kinds: dict[str, tuple[str, str, bool]] = {}
    changes = []
    fields = iter(rest.lstrip("\0\n").split("\0"))
    for field in fields:
        field = field.lstrip("\n")
        if field.startswith(":"):
            old_mode, new_mode, before, after, _ = field[1:].split(" ")
            special = bool({_LINK, _SUBMODULE} & {old_mode, new_mode})
            kinds[next(fields)] = (before.replace(_MISSING, ""), after.replace(_MISSING, ""), special)
        elif field:
            added, deleted, path = field.split("\t", 2)
            before, after, special = kinds[path]
            lines = (-1, -1) if added == "-" else (int(added), int(deleted))
            changes.append(Change(path, before, after, *lines, special))
    time = datetime.fromtimestamp(int(seconds), UTC)
    return Commit(ident, tuple(parents.split()), time, message.strip(), tuple(changes))


def _environment() -> dict[str, str]:
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "SSH_AUTH_SOCK") if name in os.environ}
    settings = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
    return {**keep, **settings, "GIT_NO_REPLACE_OBJECTS": "1", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}


def _run(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> bytes:
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"git {command[1]} took longer than {timeout_s:.0f} s") from error
    except FileNotFoundError as error:
        raise BuildError("git is not installed; install it to read repositories") from error
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
        raise BuildError(f"{' '.join(command[:2])} failed: {words[-500:]}")
    return done.stdout
