"""A tool is a typed async function. Its schema, its documentation and the reading of its arguments derive from it.

    @tool
    async def search(workspace: Workspace, search_term: str, path: str = ".") -> ToolResult:
        '''Find text in a file or a directory.

        Args:
            search_term: the text.
            path: where to look.
        '''

Parameter types: `str`, `int`, `bool`, `list[int]`, `Literal[...]`, each also with `| None` and a default.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import re
import types
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from deepswe.sandbox.base import Sandbox

ParameterKind = Literal["string", "integer", "boolean", "integers", "choice"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call led to.

    Attributes:
        text: the observation.
        error: the kind of the model's mistake, "" if none.
        done: the attempt is submitted.
    """

    text: str
    error: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of a file: its bytes before (None: there was no file) and after."""

    before: bytes | None
    after: bytes


@dataclass(slots=True)
class Workspace:
    """What tools act on: a sandbox, where the work lies in it, and what one attempt remembers between calls.

    Attributes:
        sandbox: where commands run and files lie.
        root: absolute directory of the repository; relative paths start there.
        timeout_s: seconds that the next call may take; the environment sets it before each call.
        edits: resolved path -> edits made by `file_editor`, oldest first.
        shell: the state of the shell after the last finished command, as a script that restores it.
    """

    sandbox: Sandbox
    root: str = "/testbed"
    timeout_s: float = 90.0
    edits: dict[str, list[Edit]] = field(default_factory=dict)
    shell: bytes = b""

    def resolve(self, path: str) -> str:
        """The absolute path in the sandbox. `..` is left to the sandbox, which knows the links."""
        joined = posixpath.join(self.root, path)
        return joined if ".." in joined.split("/") else posixpath.normpath(joined)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool, as derived from the signature and the docstring."""

    name: str
    kind: ParameterKind
    documentation: str
    required: bool
    default: Any = None
    choices: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """JSON schema of the value."""
        bodies: dict[str, dict[str, Any]] = {
            "string": {"type": "string"},
            "integer": {"type": "integer"},
            "boolean": {"type": "boolean"},
            "integers": {"type": "array", "items": {"type": "integer"}},
            "choice": {"type": "string", "enum": list(self.choices)},
        }
        body = {**bodies[self.kind], "description": self.documentation}
        if self.default is not None:
            body["default"] = self.default
        return body

    def expectation(self) -> str:
        """What a value must look like, for a reader."""
        return {
            "string": "text",
            "integer": "a whole number",
            "boolean": "true or false",
            "integers": "a list of whole numbers such as [1, 20]",
            "choice": "one of " + ", ".join(self.choices),
        }[self.kind]

    def read(self, text: str) -> Any:
        """The value that `text` stands for. Text is taken verbatim; the other kinds ignore white space around it.

        Raises:
            ValueError: it is not of this kind.
        """
        if self.kind == "string":
            return text
        bare = text.strip()
        if self.kind == "choice" and bare in self.choices:
            return bare
        if self.kind == "integer" and _INTEGER.fullmatch(bare):
            return int(bare)
        if self.kind == "boolean" and bare.lower() in {"true", "false"}:
            return bare.lower() == "true"
        if self.kind == "integers" and _INTEGERS.fullmatch(bare):
            return [int(number) for number in re.findall(r"-?\d+", bare)]
        raise ValueError(f"{self.name} must be {self.expectation()}, not {bare[:80]!r}")


_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_INTEGERS = re.compile(r"\[\s*(-?[0-9]{1,18}\s*(,\s*-?[0-9]{1,18}\s*)*)?\]")


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared tool."""

    name: str
    documentation: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Awaitable[ToolResult]]

    def schema(self) -> dict[str, Any]:
        """The function declaration that chat templates take as one of `tools=`."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.documentation,
                "parameters": {
                    "type": "object",
                    "properties": {parameter.name: parameter.schema() for parameter in self.parameters},
                    "required": [parameter.name for parameter in self.parameters if parameter.required],
                },
            },
        }

    def describe(self) -> str:
        """The documentation for a prompt."""
        lines = [f"{self.name}: {self.documentation}"]
        for parameter in self.parameters:
            need = "required" if parameter.required else "optional"
            if parameter.default not in (None, ""):
                need += f", default {json.dumps(parameter.default)}"
            lines.append(f"  {parameter.name} ({parameter.expectation()}; {need}): {parameter.documentation}")
        return "\n".join(lines)

    def arguments(self, texts: Mapping[str, str]) -> dict[str, Any] | ToolResult:
        """The values of a call's texts, or the mistake in them."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in texts:
            if name not in known:
                allowed = ", ".join(known)
                return ToolResult(
                    f"{self.name} has no parameter {name!r}. Its parameters: {allowed}.", "unknown_parameter"
                )
        values: dict[str, Any] = {}
        for name, parameter in known.items():
            if name not in texts:
                if parameter.required:
                    return ToolResult(
                        f"{self.name} needs the parameter {name} ({parameter.expectation()}).", "missing_parameter"
                    )
                continue
            try:
                values[name] = parameter.read(texts[name])
            except ValueError as error:
                return ToolResult(f"{self.name}: {error}.", "bad_parameter")
        return values

    async def run(self, workspace: Workspace, texts: Mapping[str, str]) -> ToolResult:
        """Read the arguments and carry the call out.

        Raises:
            SandboxError: the sandbox itself failed.
        """
        values = self.arguments(texts)
        return values if isinstance(values, ToolResult) else await self.function(workspace, **values)


def tool(function: Callable[..., Awaitable[ToolResult]]) -> Tool:
    """Declare a tool from a function whose first parameter is the `Workspace`.

    Raises:
        TypeError: a parameter has an unsupported type or no documentation.
    """
    documentation, entries = _read_docstring(inspect.getdoc(function) or "")
    hints = get_type_hints(function)
    parameters = []
    for name, declared in list(inspect.signature(function).parameters.items())[1:]:
        if name not in entries:
            raise TypeError(f"tool {function.__name__}: parameter {name} has no line under Args in the docstring")
        kind, choices = _kind_of(function.__name__, name, hints[name])
        required = declared.default is inspect.Parameter.empty
        default = None if required else declared.default
        parameters.append(Parameter(name, kind, entries[name], required, default, choices))
    return Tool(function.__name__, documentation, tuple(parameters), function)


def _kind_of(tool_name: str, name: str, hint: Any) -> tuple[ParameterKind, tuple[str, ...]]:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not types.NoneType)
    if get_origin(hint) is Literal:
        return "choice", get_args(hint)
    kinds: dict[Any, ParameterKind] = {str: "string", int: "integer", bool: "boolean", list[int]: "integers"}
    for candidate, kind in kinds.items():
        if hint == candidate:
            return kind, ()
    raise TypeError(f"tool {tool_name}: parameter {name} has type {hint}; use str, int, bool, list[int] or Literal")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Description and parameter lines of a docstring with an `Args:` section."""
    description, _, rest = text.partition("\nArgs:\n")
    entries: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        started = re.match(r"    (\w+): (.*)", line)
        if started:
            name = started[1]
            entries[name] = started[2]
        elif name and line.startswith("        "):
            entries[name] += " " + line.strip()
        elif line.strip():
            break
    return " ".join(description.split()), entries
