"""The tool that finds text."""

from __future__ import annotations

from collections.abc import Mapping

from deepswe.sandbox.base import ExecResult
from deepswe.sandbox.memory import MemorySandbox
from deepswe.tools.declare import ToolResult, Workspace, tool
from deepswe.tools.output import plural, printable, shorten

_SKIPPED = (".git", "__pycache__")


@tool
async def search(workspace: Workspace, search_term: str, path: str = ".") -> ToolResult:
    """Find text, exactly as written, in a file or in every file of a directory; shows the lines with their numbers.

    Args:
        search_term: the text, within one line; letters must match in case.
        path: a file or a directory, relative to the repository or absolute.
    """
    if not search_term or "\n" in search_term or "\0" in search_term:
        return ToolResult("search_term must be text within one line. Search for one line of it.", "bad_parameter")
    target = workspace.resolve(path)
    if isinstance(workspace.sandbox, MemorySandbox):
        result = grep_files(workspace.sandbox.files, search_term, target)
    else:
        skipped = [f"--exclude-dir={name}" for name in _SKIPPED]
        command = ["grep", "-rHnIF", "--null", *skipped, "-e", search_term, "--", target]
        result = await workspace.sandbox.exec(command, timeout_s=workspace.timeout_s, env={"LC_ALL": "C"})
    if result.timed_out:
        return ToolResult(f"The search took too long. Give a smaller path than {path}.", "command_timeout")
    if result.exit_code > 1 and not result.stdout:
        return ToolResult(_refusal(result, path), "no_path")
    return ToolResult(format_matches(read_matches(result.stdout), search_term, path, target))


def _refusal(result: ExecResult, path: str) -> str:
    reason = printable(result.stderr).strip().rpartition(": ")[2] or "it cannot be read"
    return f"{path} cannot be searched: {reason}. Search the directory . instead."


def grep_files(files: Mapping[str, bytes], term: str, target: str) -> ExecResult:
    """What the grep of `search` gives for files in memory: absolute path -> bytes."""
    prefix = target.rstrip("/") + "/"
    inside = [
        name
        for name in files
        if name.startswith(prefix) and not set(name[len(prefix) :].split("/")[:-1]) & set(_SKIPPED)
    ]
    names = [target] if target in files else inside
    if not names and not any(name.startswith(prefix) for name in files):
        return ExecResult(2, b"", f"grep: {target}: No such file or directory\n".encode())
    wanted, rows = term.encode("utf-8", "surrogateescape"), []
    for name in names:
        data = files[name]
        if b"\0" in data:
            continue
        lines = data.removesuffix(b"\n").split(b"\n") if data else []
        rows += [b"%s\0%d:%s\n" % (name.encode(), n, line) for n, line in enumerate(lines, 1) if wanted in line]
    return ExecResult(0 if rows else 1, b"".join(rows), b"")


def read_matches(output: bytes) -> dict[str, list[tuple[int, str]]]:
    """grep's `FILE NUL NUMBER:LINE` rows, as file -> (number, line). A row cut off at the end is left out."""
    matches: dict[str, list[tuple[int, str]]] = {}
    for row in output.split(b"\n")[:-1]:
        name, separator, rest = row.partition(b"\0")
        number, colon, line = rest.partition(b":")
        if separator and colon and number.isdigit():
            matches.setdefault(printable(name), []).append((int(number), printable(line).rstrip("\r")))
    return matches


def format_matches(matches: dict[str, list[tuple[int, str]]], term: str, path: str, target: str) -> str:
    """The observation: for a directory each file with its count and its lines, for a file its lines."""
    if not matches:
        return f"No match for {term} in {path}"
    if set(matches) == {target}:
        return shorten("\n".join(f"{number}\t{line}" for number, line in matches[target]))
    prefix = target.rstrip("/") + "/"
    rows = []
    for name in sorted(matches):
        rows.append(f"{name.removeprefix(prefix)} ({plural(len(matches[name]), 'match').replace('matchs', 'matches')})")
        rows += [f"{number}\t{line}" for number, line in matches[name]]
    return shorten("\n".join(rows))
