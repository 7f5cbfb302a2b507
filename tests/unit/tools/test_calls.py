from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepswe.tools.calls import Parsed, document_calls, parse_call, render_call
from deepswe.tools.catalog import TOOLS
from deepswe.types import ToolCall

NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
PIECES = st.sampled_from(["</parameter>", "<parameter=a>", "</function>", "<function=x>", "\n", " ", "<", "é", "\r"])
VALUES = st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=6).map("".join)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=4))


@given(CALLS)
def test_xml_round_trip_is_exact_or_refused(call: ToolCall) -> None:
    try:
        text = render_call(call, "xml", TOOLS)
    except ValueError:
        assert any("</parameter>" in value for value in call.arguments.values())
        return
    assert parse_call(text, "xml") == Parsed(call)
    assert parse_call(f"I think.\n{text}\n", "xml") == Parsed(call)


@given(CALLS)
def test_native_round_trip_is_exact(call: ToolCall) -> None:
    assert parse_call(render_call(call, "native", TOOLS), "native").call == call


@given(st.text(max_size=60))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    for written in ("", "<function=", "<tool_call>"):
        for call_format in ("xml", "native"):
            parsed = parse_call(written + text, call_format)  # type: ignore[arg-type]
            assert (parsed.call is None) == (parsed.mistake is not None)


def test_rendering_is_canonical() -> None:
    call = ToolCall("file_editor", {"command": "view", "path": "cart.py"})
    assert render_call(call, "xml", TOOLS) == (
        "<function=file_editor>\n<parameter=command>view</parameter>\n<parameter=path>cart.py</parameter>\n</function>"
    )
    ranged = ToolCall("file_editor", {"command": "view", "path": "a", "view_range": "[1, 2]"})
    assert render_call(ranged, "native", TOOLS) == (
        '<tool_call>\n{"name": "file_editor", "arguments": {"command": "view", "path": "a", "view_range": [1, 2]}}\n'
        "</tool_call>"
    )


def test_line_breaks_inside_the_tags_belong_to_the_value() -> None:
    parsed = parse_call("<function=f><parameter=old_str>\n  a \n</parameter></function>", "xml")
    assert parsed.call == ToolCall("f", {"old_str": "\n  a \n"})


def test_a_value_may_hold_an_end_tag_that_no_tag_follows() -> None:
    call = ToolCall("f", {"a": "x </parameter> y", "b": "</function>"})
    assert parse_call(render_call(call, "xml", TOOLS), "xml").call == call
    with pytest.raises(ValueError, match="cannot carry"):
        render_call(ToolCall("f", {"a": "x</parameter>\n</function>"}), "xml", TOOLS)


def test_the_first_of_two_calls_counts() -> None:
    text = "<function=a></function> then <function=b></function>"
    assert parse_call(text, "xml") == Parsed(ToolCall("a", {}), extra=True)


def test_calls_in_thoughts_do_not_count() -> None:
    thought = "<think>maybe <function=a></function></think>"
    assert parse_call(f"{thought}<function=b></function>", "xml").call == ToolCall("b", {})
    assert parse_call("<think><function=a></function>", "xml").call is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("I am done.", "no_call"),
        ("<function=f><parameter=a>x</function>", "unclosed_tag"),
        ("<function=f><parameter=a>x</parameter>", "unclosed_tag"),
        ("<function=f>hello</function>", "malformed_call"),
        ("<function=f><parameter=a>x</parameter><parameter=a>y</parameter></function>", "repeated_parameter"),
    ],
)
def test_each_broken_xml_call_has_its_kind(text: str, kind: str) -> None:
    mistake = parse_call(text, "xml").mistake
    assert mistake is not None
    assert mistake.error == kind
    assert mistake.text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("no", "no_call"),
        ("<tool_call>{", "malformed_call"),
        ('<tool_call>{"name": 1}</tool_call>', "malformed_call"),
        ('<tool_call>{"name": "f", "arguments": {}}', "unclosed_tag"),
    ],
)
def test_each_broken_native_call_has_its_kind(text: str, kind: str) -> None:
    mistake = parse_call(text, "native").mistake
    assert mistake is not None
    assert mistake.error == kind


def test_native_values_that_are_no_text_become_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"r": [1, -1], "b": true, "n": null, "s": "x"}}</tool_call>'
    assert parse_call(text, "native").call == ToolCall("f", {"r": "[1, -1]", "b": "true", "s": "x"})


def test_documentation_names_every_tool_and_the_form_of_a_call() -> None:
    for call_format, form in (("xml", "<function=NAME>"), ("native", "<tool_call>")):
        text = document_calls(TOOLS, call_format)  # type: ignore[arg-type]
        assert form in text
        assert all(f"{declared.name}: " in text for declared in TOOLS)
