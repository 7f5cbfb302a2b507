"""A sandbox over a dictionary of files that runs nothing, to record reference trajectories cheaply."""

from __future__ import annotations

import errno
import itertools
import os
import posixpath
from collections.abc import Mapping, Sequence

from deepswe.errors import SandboxError
from deepswe.sandbox.base import ExecResult
from deepswe.sandbox.files import SKIPPED

_numbers = itertools.count(1)


class MemorySandbox:
    """Files in memory, behind the `Sandbox` protocol. Directories exist where files lie under them."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        """Start from `files`: absolute path -> bytes."""
        self._id = f"memory-{next(_numbers)}"
        self.files: dict[str, bytes] = {_absolute(path): data for path, data in (files or {}).items()}

    @property
    def id(self) -> str:
        """Unique in this process."""
        return self._id

    @property
    def enforced(self) -> Mapping[str, str]:
        """Nothing runs, so nothing is limited."""
        return dict.fromkeys(("memory_mib", "disk_mib", "pids", "cpus", "output_bytes"), "none")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        channel: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> ExecResult:
        """Always refused.

        Raises:
            SandboxError: this sandbox runs no commands.
        """
        raise SandboxError(f"this sandbox runs no commands (asked for {list(argv)!r})")

    async def read_file(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """The bytes of one file; errors as in the protocol."""
        path = _absolute(path)
        data = self.files.get(path)
        if data is None:
            code = errno.EISDIR if self._is_directory(path) else errno.ENOENT
            raise OSError(code, os.strerror(code), path)
        if len(data) > max_bytes:
            raise ValueError(f"{path} has {len(data)} bytes, more than the {max_bytes} asked for")
        return data

    async def write_files(self, files: Mapping[str, bytes], *, executable: bool = False) -> None:
        """Write whole files; errors as in the protocol."""
        for path, data in files.items():
            path = _absolute(path)
            if self._is_directory(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            parent = posixpath.dirname(path)
            while parent != "/":
                if parent in self.files:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
                parent = posixpath.dirname(parent)
            self.files[path] = bytes(data)

    async def list_names(self, path: str, *, depth: int, timeout_s: float) -> list[bytes]:
        """Names below a directory; see the protocol."""
        prefix = _absolute(path).rstrip("/") + "/"
        names = set()
        for file in self.files:
            parts = file.removeprefix(prefix).split("/") if file.startswith(prefix) else []
            for level in range(1, min(len(parts), depth) + 1):
                if parts[level - 1].startswith(".") or parts[level - 1] == "__pycache__":
                    break
                names.add("/".join(parts[:level]) + ("/" if level < len(parts) else ""))
        return [os.fsencode(name) for name in names]

    async def find_text(self, text: str, path: str, *, timeout_s: float) -> ExecResult:
        """Lines that hold `text`, as grep gives them; see the protocol."""
        path = _absolute(path)
        prefix = path.rstrip("/") + "/"
        below = [name for name in self.files if name.startswith(prefix)]
        if path not in self.files and not below:
            return ExecResult(2, b"", os.fsencode(f"grep: {path}: No such file or directory\n"))
        shown = [name for name in below if not set(name[len(prefix) :].split("/")[:-1]) & set(SKIPPED)]
        rows: list[bytes] = []
        for name in [path] if path in self.files else shown:
            rows += _matches(os.fsencode(name), self.files[name], os.fsencode(text))
        return ExecResult(0 if rows else 1, b"".join(rows), b"")

    def _is_directory(self, path: str) -> bool:
        prefix = path.rstrip("/") + "/"
        return any(name.startswith(prefix) for name in self.files)


def _matches(name: bytes, data: bytes, wanted: bytes) -> list[bytes]:
    if b"\0" in data or not data:
        return []
    lines = enumerate(data.removesuffix(b"\n").split(b"\n"), 1)
    return [b"%s\0%d:%s\n" % (name, number, line) for number, line in lines if wanted in line]


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"path {path!r} is not absolute")
    return posixpath.normpath("/" + path.lstrip("/"))
