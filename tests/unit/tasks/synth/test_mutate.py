from __future__ import annotations

import ast

import pytest

from deepswe.errors import TaskError
from deepswe.tasks.synth.mutate import OPERATORS, Mutation, is_sound, mutations

EXAMPLES = {
    "flip_comparison": ("return a < b", "return a <= b"),
    "swap_arithmetic": ("return a + b", "return a - b"),
    "swap_augmented": ("a += 2", "a -= 2"),
    "swap_boolean": ("return a and b", "return a or b"),
    "drop_term": ("return a and b", "return a"),
    "off_by_one": ("return a[1]", "return a[2]"),
    "flip_flag": ("return True", "return False"),
    "negate_condition": ("if a:\n        b = 1", "if not a:\n        b = 1"),
    "drop_not": ("return not a", "return a"),
    "drop_guard": ("if a:\n        return b\n    return a", "return a"),
    "drop_branch": ("if a:\n        b = 1\n    else:\n        b = 2", "if a:\n        b = 1"),
    "drop_statement": ("a.append(b)\n    return a", "return a"),
    "swap_arguments": ("return f(a, b)", "return f(b, a)"),
    "drop_argument": ("return f(a, key=b)", "return f(a)"),
    "wrong_variable": ("return f(a)", "return f(b)"),
    "shift_slice": ("return a[b:]", "return a[b + 1:]"),
    "shift_range": ("return range(len(a))", "return range(len(a) - 1)"),
    "swap_jump": ("for i in a:\n        break", "for i in a:\n        continue"),
    "narrow_except": (
        "try:\n        f()\n    except KeyError:\n        a = b",
        "try:\n        f()\n    except IndexError:\n        a = b",
    ),
    "swap_call": ("return min(a, b)", "return max(a, b)"),
    "drop_call": ("return a.strip()", "return a"),
    "swap_ternary": ("return 1 if a else 2", "return 2 if a else 1"),
    "drop_minus": ("return -a", "return a"),
    "wrong_return": ("return a, b", "return b, a"),
}


def function(body: str) -> str:
    return f"def g(a, b):\n    {body}\n"


def test_every_operator_has_an_example() -> None:
    assert set(EXAMPLES) == set(OPERATORS)
    assert len(OPERATORS) >= 12


@pytest.mark.parametrize("kind", EXAMPLES)
def test_operator_makes_its_bug(kind: str) -> None:
    before, after = (function(body) for body in EXAMPLES[kind])
    results = {m.apply(before) for m in mutations("g.py", before) if m.kind == kind}
    assert ast.dump(ast.parse(after)) in {ast.dump(ast.parse(result)) for result in results}


def test_rest_of_the_file_keeps_every_byte() -> None:
    text = 'def g(a):  # ünïcode\n\treturn (a   <   1)   # kept\n\n\nX = "ä"\n'
    [flipped, *_] = [m for m in mutations("g.py", text) if m.kind == "flip_comparison"]
    assert flipped.apply(text) == text.replace("a   <   1", "a <= 1")
    assert (flipped.line, flipped.last_line, flipped.function) == (2, 2, "g")


def test_strings_annotations_decorators_and_assertions_are_left_alone() -> None:
    text = '@deco(1)\ndef g(a: "int[1]" = None) -> 2:\n    """Doc 3."""\n    assert a < 4\n    return f"{a + 5}"\n'
    assert mutations("g.py", text) == ()


def test_functions_in_classes_have_dotted_names() -> None:
    text = "class A:\n    def m(self):\n        return 1\n"
    assert {m.function for m in mutations("a.py", text)} == {"A.m"}


def test_edit_that_changes_nothing_or_does_not_parse_is_unsound() -> None:
    text = "def g(a):\n    return a\n"
    assert not is_sound(Mutation("g.py", "x", 0, 0, ""), text)
    assert not is_sound(Mutation("g.py", "x", 0, 3, "("), text)
    assert is_sound(Mutation("g.py", "x", len(text) - 2, len(text) - 1, "b"), text)


def test_edit_outside_of_the_text_is_refused() -> None:
    with pytest.raises(TaskError, match=r"bytes 5\.\.99 lies outside its 4 bytes"):
        Mutation("g.py", "x", 5, 99, "").apply("abcd")


def test_file_that_is_no_python_is_refused() -> None:
    with pytest.raises(TaskError, match=r"g\.py cannot be mutated"):
        mutations("g.py", "def (")
