"""The unittest runner's way of telling a value."""

from __future__ import annotations

import ast
import collections
import enum
from pathlib import Path
from typing import Any

import pytest

import deepswe.grading.runner as room


def load_plain() -> Any:
    """The function `plain` out of the runner's text, which is no module to import."""
    text = (Path(room.__file__).parent / "unittest_runner.py").read_text(encoding="utf-8")
    node = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "plain")
    space: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), "plain", "exec"), space)
    return space["plain"]


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "10"

    __hash__ = int.__hash__


Colour = enum.IntEnum("Colour", "RED")


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 1.5, float("inf"), 2j, "a'b\n", b"x", [1, [2]], (), (1,), {"a": {1: None}}, {1, 2}, set()],
)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert ast.literal_eval(load_plain()(value)) == value


def test_subclasses_are_told_by_what_they_hold_not_by_what_they_say() -> None:
    plain = load_plain()
    assert plain(Liar(7)) == "7"
    assert plain(Colour.RED) == "1"
    assert ast.literal_eval(plain(collections.OrderedDict(a=[Liar(3)]))) == {"a": [3]}
    assert ast.literal_eval(plain(frozenset({1}))) == {1}


@pytest.mark.parametrize("value", [object(), [object()], len, range(3), {"a": object()}])
def test_anything_else_cannot_be_told(value: object) -> None:
    with pytest.raises(TypeError, match="a value of the class"):
        load_plain()(value)
