"""How a call is written in the model's text: XML, or the JSON of Hermes and Qwen. Reading, writing, documentation.

XML values are exact: everything between `<parameter=KEY>` and its `</parameter>` is the value, line breaks right after
the opening tag and right before the closing tag included. A value ends at the first `</parameter>` that is followed,
white space apart, by `<parameter=` or `</function>`, so a value may hold a `</parameter>` of its own elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepswe.tools.declare import Tool, ToolResult, Workspace
from deepswe.types import ToolCall

CallFormat = Literal["xml", "native"]


@dataclass(frozen=True, slots=True)
class Parsed:
    """What was found in a turn.

    Attributes:
        call: the first call, None if there is none that can be read.
        mistake: what to tell the model, and its kind, when `call` is None.
        extra: there is a second call, which does not count.
    """

    call: ToolCall | None
    mistake: ToolResult | None = None
    extra: bool = False


def parse_call(completion: str, call_format: CallFormat) -> Parsed:
    """The first call of a turn. Calls inside a leading `<think>` block do not count."""
    text = _without_thinking(completion)
    return _parse_xml(text) if call_format == "xml" else _parse_native(text)


def render_call(call: ToolCall, call_format: CallFormat, tools: Sequence[Tool]) -> str:
    """The one way in which we write a call.

    Raises:
        ValueError: the format cannot carry it exactly.
    """
    text = _render_xml(call) if call_format == "xml" else _render_native(call, tools)
    found = parse_call(text, call_format)
    if found.call is None or (call_format == "xml" and found != Parsed(call)):
        raise ValueError(f"the {call_format} format cannot carry this call of {call.name}: a value holds its end tag")
    return text


async def run_call(workspace: Workspace, call: ToolCall, tools: Sequence[Tool]) -> ToolResult:
    """Carry one call out.

    Raises:
        SandboxError: the sandbox itself failed.
    """
    for candidate in tools:
        if candidate.name == call.name:
            return await candidate.run(workspace, call.arguments)
    names = ", ".join(candidate.name for candidate in tools)
    return ToolResult(f"There is no tool {call.name!r}. The tools are {names}.", "unknown_tool")


def _without_thinking(completion: str) -> str:
    if not completion.lstrip().startswith("<think>"):
        return completion
    return completion.partition("</think>")[2]


_XML_EXAMPLE = "<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>"
_XML_OPEN = re.compile(r"<function=([^<>\n]*)>")
_XML_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>")
_XML_CLOSE = re.compile(r"\s*</function>")
_XML_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=[^<>\n]*>|</function>))")


def _parse_xml(text: str) -> Parsed:
    opened = _XML_OPEN.search(text)
    if opened is None:
        return _mistake(f"No call was found. Make one call:\n{_XML_EXAMPLE}", "no_call")
    name, at = opened[1], opened.end()
    arguments: dict[str, str] = {}
    while not (closed := _XML_CLOSE.match(text, at)):
        parameter = _XML_PARAMETER.match(text, at)
        if parameter is None:
            return _xml_broken(text, at, name)
        key = parameter[1]
        end = _XML_VALUE_END.search(text, parameter.end())
        if end is None:
            return _xml_unclosed(key)
        if key in arguments:
            return _mistake(f"The parameter {key} is given twice. Give it once.", "repeated_parameter")
        arguments[key] = text[parameter.end() : end.start()]
        at = end.end()
    return Parsed(ToolCall(name, arguments), extra=_XML_OPEN.search(text, closed.end()) is not None)


def _xml_unclosed(key: str) -> Parsed:
    return _mistake(
        f"The parameter {key} does not end. Close it with </parameter> and the call with </function>.", "unclosed_tag"
    )


def _xml_broken(text: str, at: int, name: str) -> Parsed:
    if "</function>" in text[at:]:
        return _mistake(
            f"The call of {name} has text outside its parameters. Write it as:\n{_XML_EXAMPLE}", "malformed_call"
        )
    return _mistake(f"The call of {name} does not end. Close it with </function>.", "unclosed_tag")


def _render_xml(call: ToolCall) -> str:
    rows = [f"<parameter={key}>{value}</parameter>\n" for key, value in call.arguments.items()]
    return f"<function={call.name}>\n{''.join(rows)}</function>"


_NATIVE_OPEN = "<tool_call>"
_NATIVE_CLOSE = re.compile(r"\s*</tool_call>")
_NATIVE_EXAMPLE = '<tool_call>\n{"name": NAME, "arguments": {KEY: VALUE}}\n</tool_call>'
_SPACE = re.compile(r"\s*")


def _parse_native(text: str) -> Parsed:
    opened = text.find(_NATIVE_OPEN)
    if opened < 0:
        return _mistake(f"No call was found. Make one call:\n{_NATIVE_EXAMPLE}", "no_call")
    start = opened + len(_NATIVE_OPEN)
    begin = start + len(_leading_space(text, start))
    try:
        body, at = json.JSONDecoder(strict=False).raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        return _mistake(f"The call is not valid JSON ({error}). Write it as:\n{_NATIVE_EXAMPLE}", "malformed_call")
    closed = _NATIVE_CLOSE.match(text, at)
    if closed is None:
        return _mistake("The call does not end. Close it with </tool_call>.", "unclosed_tag")
    call = _native_call(body)
    if call is None:
        return _mistake(f"The call needs a name and arguments. Write it as:\n{_NATIVE_EXAMPLE}", "malformed_call")
    return Parsed(call, extra=_NATIVE_OPEN in text[closed.end() :])


def _leading_space(text: str, at: int) -> str:
    found = _SPACE.match(text, at)
    return found[0] if found else ""


def _native_call(body: Any) -> ToolCall | None:
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        return None
    arguments = body.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in arguments.items()
        if value is not None
    }
    return ToolCall(body["name"], texts)


def _render_native(call: ToolCall, tools: Sequence[Tool]) -> str:
    body = {"name": call.name, "arguments": _native_arguments(call, tools)}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _native_arguments(call: ToolCall, tools: Sequence[Tool]) -> dict[str, Any]:
    known = {p.name: p for candidate in tools if candidate.name == call.name for p in candidate.parameters}
    values: dict[str, Any] = {}
    for key, text in call.arguments.items():
        try:
            values[key] = known[key].read(text) if key in known else text
        except ValueError:
            values[key] = text
    return values


def _mistake(text: str, kind: str) -> Parsed:
    return Parsed(None, ToolResult(text, kind))


def document_calls(tools: Sequence[Tool], call_format: CallFormat) -> str:
    """What the system prompt says about the tools and about how to call them."""
    example = _XML_EXAMPLE if call_format == "xml" else _NATIVE_EXAMPLE
    exact = (
        "A value is everything between its tags, exactly: do not add spaces or line breaks that do not belong to it, "
        "and do not escape anything."
        if call_format == "xml"
        else "Values are JSON."
    )
    described = "\n\n".join(candidate.describe() for candidate in tools)
    return f"Tools:\n\n{described}\n\nA call is written like this:\n\n{example}\n\n{exact}"
