"""The tool that finds text."""

from __future__ import annotations

from deepswe.sandbox.base import ExecResult
from deepswe.tools.declare import ToolResult, Workspace, tool
from deepswe.tools.output import plural, printable, shorten


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
    result = await workspace.sandbox.find_text(search_term, target, timeout_s=workspace.timeout_s)
    if result.timed_out:
        return ToolResult(f"The search took too long. Give a smaller path than {path}.", "command_timeout")
    if result.exit_code > 1 and not result.stdout:
        return ToolResult(_refusal(result, path), "no_path")
    return ToolResult(format_matches(read_matches(result.stdout), search_term, path, target))


def _refusal(result: ExecResult, path: str) -> str:
    reason = printable(result.stderr).strip().rpartition(": ")[2] or "it cannot be read"
    return f"{path} cannot be searched: {reason}. Search the directory . instead."


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
