from __future__ import annotations

from typing import Literal

import pytest

from deepswe.tools.catalog import TOOLS
from deepswe.tools.declare import ToolResult, Workspace, tool
from deepswe.tools.editor import file_editor
from deepswe.tools.finish import finish
from deepswe.tools.search import search


def test_schema_and_documentation_derive_from_the_function() -> None:
    @tool
    async def paint(workspace: Workspace, colour: Literal["red", "blue"], coats: int = 2) -> ToolResult:
        """Paint
        it.

        Args:
            colour: which one.
            coats: how
                often.
        """
        return ToolResult(colour * coats)

    assert paint.schema() == {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paint it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "colour": {"type": "string", "enum": ["red", "blue"], "description": "which one."},
                    "coats": {"type": "integer", "description": "how often.", "default": 2},
                },
                "required": ["colour"],
            },
        },
    }
    assert paint.describe() == (
        "paint: Paint it.\n"
        "  colour (one of red, blue; required): which one.\n"
        "  coats (a whole number; optional, default 2): how often."
    )


def test_a_parameter_without_documentation_is_refused() -> None:
    async def bare(workspace: Workspace, x: str) -> ToolResult:
        """Nothing."""
        return ToolResult(x)

    with pytest.raises(TypeError, match="parameter x has no line"):
        tool(bare)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({}, "missing_parameter", "needs the parameter command"),
        ({"command": "view"}, "missing_parameter", "needs the parameter path"),
        ({"command": "look", "path": "a"}, "bad_parameter", "one of view, create"),
        ({"command": "view", "path": "a", "line": "1"}, "unknown_parameter", "Its parameters: command, path"),
        ({"command": "insert", "path": "a", "insert_line": "two"}, "bad_parameter", "a whole number"),
        ({"command": "view", "path": "a", "view_range": "1-2"}, "bad_parameter", "[1, 20]"),
        ({"command": "view", "path": "a", "concise": "yes"}, "bad_parameter", "true or false"),
    ],
)
def test_each_wrong_argument_is_named_with_what_to_do(arguments: dict[str, str], kind: str, says: str) -> None:
    result = file_editor.arguments(arguments)
    assert isinstance(result, ToolResult)
    assert result.error == kind
    assert says in result.text


def test_text_is_taken_verbatim_and_other_kinds_ignore_space() -> None:
    texts = {"command": " view ", "path": " a\n", "view_range": "\n[1, -1]\n", "concise": "True"}
    assert file_editor.arguments(texts) == {"command": "view", "path": " a\n", "view_range": [1, -1], "concise": True}
    assert finish.arguments({}) == {}
    assert search.arguments({"search_term": "a"}) == {"search_term": "a"}


def test_every_tool_documents_every_parameter() -> None:
    for declared in TOOLS:
        assert declared.documentation
        assert all(parameter.documentation for parameter in declared.parameters)
