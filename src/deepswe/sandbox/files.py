"""Looking through files by the sandbox's own programs: the part of `Sandbox` that needs nothing but `exec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from deepswe.sandbox.base import ExecResult

SKIPPED = (".git", "__pycache__")
"""Directories that a search leaves out."""


class _Runs(Protocol):
    async def exec(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> ExecResult: ...


class CommandFiles:
    """`list_names` and `find_text` of the protocol, by `find` and `grep`. A backend's sandbox inherits it."""

    __slots__ = ()

    async def list_names(self: _Runs, path: str, *, depth: int, timeout_s: float) -> list[bytes]:
        """Names below a directory; see the protocol."""
        hidden = ["(", "-name", ".*", "-o", "-name", "__pycache__", ")", "-prune"]
        wanted = ["-type", "d", "-printf", "%P/\\0", "-o", "-printf", "%P\\0"]
        command = ["find", "-H", path, "-mindepth", "1", "-maxdepth", str(depth), *hidden, "-o", *wanted]
        result = await self.exec(command, timeout_s=timeout_s)
        return [name for name in result.stdout.split(b"\0") if name]

    async def find_text(self: _Runs, text: str, path: str, *, timeout_s: float) -> ExecResult:
        """Lines that hold `text`; see the protocol."""
        skipped = [f"--exclude-dir={name}" for name in SKIPPED]
        command = ["grep", "-rHnIF", "--null", *skipped, "-e", text, "--", path]
        return await self.exec(command, timeout_s=timeout_s, env={"LC_ALL": "C"})
