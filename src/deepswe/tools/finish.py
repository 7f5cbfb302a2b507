"""The tool that ends an attempt."""

from __future__ import annotations

from typing import Literal

from deepswe.tools.declare import ToolResult, Workspace, tool


@tool
async def finish(workspace: Workspace, command: Literal["submit"] = "submit", result: str = "") -> ToolResult:
    """Submit the work as it stands in the repository. Nothing can be done after it.

    Args:
        command: always submit.
        result: a closing remark, if there is one to make.
    """
    return ToolResult("Submitted.", done=True)
