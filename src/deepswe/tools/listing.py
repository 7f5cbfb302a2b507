"""The names in a directory of the sandbox."""

from __future__ import annotations

from collections.abc import Mapping

from deepswe.sandbox.memory import MemorySandbox
from deepswe.tools.declare import Workspace
from deepswe.tools.output import printable

DEPTH = 2
"""Levels of a directory that `view` shows."""


async def list_directory(workspace: Workspace, path: str) -> str:
    """Names to depth 2, sorted, directories with a slash; hidden ones and byte code are left out.

    Raises:
        SandboxError: the sandbox itself failed.
    """
    target = workspace.resolve(path)
    if isinstance(workspace.sandbox, MemorySandbox):
        names = names_in_memory(workspace.sandbox.files, target)
        return "\n".join(names) if names else f"{path} is an empty directory."
    hidden = ["(", "-name", ".*", "-o", "-name", "__pycache__", ")", "-prune"]
    wanted = ["-type", "d", "-printf", "%P/\\0", "-o", "-printf", "%P\\0"]
    command = ["find", "-H", target, "-mindepth", "1", "-maxdepth", str(DEPTH), *hidden, "-o", *wanted]
    result = await workspace.sandbox.exec(command, timeout_s=workspace.timeout_s)
    names = sorted(printable(name) for name in result.stdout.split(b"\0") if name)
    return "\n".join(names) if names else f"{path} is an empty directory."


def names_in_memory(files: Mapping[str, bytes], target: str) -> list[str]:
    """What `find` gives for files in memory: absolute path -> bytes."""
    prefix = target.rstrip("/") + "/"
    names = set()
    for path in files:
        parts = path.removeprefix(prefix).split("/") if path.startswith(prefix) else []
        for level in range(1, min(len(parts), DEPTH) + 1):
            if parts[level - 1].startswith(".") or parts[level - 1] == "__pycache__":
                break
            names.add("/".join(parts[:level]) + ("/" if level < len(parts) else ""))
    return sorted(names)
