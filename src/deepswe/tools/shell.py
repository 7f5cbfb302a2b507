"""The tool that runs commands. Each runs in a new bash; the shell's state travels with us, not in the sandbox.

Standard input holds a script that restores the state of the last finished command and sets a trap; the trap writes the
new state to the channel (descriptor 3) when the shell exits, however it does, unless a signal kills it. So a command
that is killed after its time leaves the state from before it. The command itself cannot see the channel.
"""

from __future__ import annotations

import re
import shlex

from deepswe.sandbox.base import ExecResult
from deepswe.tools.declare import ToolResult, Workspace, tool
from deepswe.tools.output import printable, shorten

_RUN = '. /dev/stdin; builtin eval "$_DEEPSWE_COMMAND" 3>&-'
_SAVE = (
    "{ builtin unset _DEEPSWE_COMMAND; builtin set +xv; builtin declare -p; builtin declare -f; builtin declare -F; "
    "builtin alias -p; builtin umask -p; "
    'builtin printf "builtin cd -- %q || builtin cd -- %q\\nOLDPWD=%q\\n" "$PWD" "{root}" "${OLDPWD-}"; '
    "builtin shopt -p; builtin set +o; builtin echo {end}; } >&3 2>/dev/null"
)
_END = b"# end of state\n"
_OWN_VARIABLES = re.compile(
    rb"^declare -\S+ (?:BASH\w*|COMP_\w+|DIRSTACK|EPOCH\w+|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|RANDOM"
    rb"|SANDBOX_\w+|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_)(?:=.*)?\n|^shopt -u compat\d+\n",
    re.MULTILINE,
)
"""Variables that bash sets itself. Most cannot be set, and trying ends the restoring."""


@tool
async def execute_bash(workspace: Workspace, cmd: str) -> ToolResult:
    """Run a bash command and see its exit code and output. The working directory, variables and functions are kept.

    Args:
        cmd: the command; it may have several lines. It gets no input and must end by itself.
    """
    if "\0" in cmd:
        return ToolResult("cmd must not contain a NUL character.", "bad_parameter")
    result = await workspace.sandbox.exec(
        ["bash", "--noprofile", "--norc", "-c", _RUN],
        timeout_s=workspace.timeout_s,
        cwd=workspace.root,
        stdin=shell_script(cmd, workspace.shell, workspace.root),
        channel=True,
    )
    if not result.timed_out and result.channel.endswith(_END):
        workspace.shell = _OWN_VARIABLES.sub(b"", result.channel)
    return ToolResult(describe(result, workspace.timeout_s), "command_timeout" if result.timed_out else "")


def shell_script(command: str, state: bytes, root: str) -> bytes:
    """The script that restores `state` and prepares `command`."""
    save = _SAVE.replace("{root}", shlex.quote(root)).replace("{end}", shlex.quote(_END.decode().strip()))
    restore = b"{\n" + state + b"} >/dev/null 2>&1\n" if state else b""
    prepare = f"exec </dev/null 2>&1\ntrap -- {shlex.quote(save)} EXIT\n_DEEPSWE_COMMAND={shlex.quote(command)}\n"
    return prepare.encode("utf-8", "surrogateescape") + restore


def describe(result: ExecResult, timeout_s: float) -> str:
    """The observation: the exit code, then what the command printed."""
    if result.timed_out:
        head = f"stopped after {timeout_s:.0f} s, with everything it had started"
    else:
        head = f"exit code {result.exit_code}"
    output = shorten(printable(result.stdout + result.stderr).rstrip("\n"))
    if result.stdout_dropped or result.stderr_dropped:
        output += f"\n[{result.stdout_dropped + result.stderr_dropped} more bytes left out]"
    return f"{head}\n{output}" if output else head
