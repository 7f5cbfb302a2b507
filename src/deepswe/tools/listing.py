"""The names in a directory of the sandbox."""

from __future__ import annotations

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
    found = await workspace.sandbox.list_names(target, depth=DEPTH, timeout_s=workspace.timeout_s)
    names = sorted(printable(name) for name in found)
    return "\n".join(names) if names else f"{path} is an empty directory."
