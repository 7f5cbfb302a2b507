from __future__ import annotations

import random

import pytest

from deepswe.tasks.synth.symptom import SYMPTOM_STYLES, Symptom, read_symptom, write_symptom

MODULE = """from calc import clamp, Table


def test_one():
    table = Table()
    assert table.insert(clamp(1, 2, 3)) == 4


def test_two():
    with raises(ValueError):
        clamp("a", 1, 2)
"""
CODE = {"calc.py": 'def clamp(value, low, high):\n    """Move a value into the range from low to high."""\n'}


def symptom(line: int, error: str, message: str, reveal: bool = True) -> Symptom:
    return read_symptom(MODULE, line, error, message, CODE, project="calc", version="1.0", reveal=reveal)


def test_values_of_a_failed_comparison_are_told() -> None:
    found = symptom(6, "AssertionError", "assert 3 == 4\n +  where 3 = insert(2)")
    assert (found.actual, found.expected, found.error) == ("3", "4", "")
    assert symptom(6, "AssertionError", "3 != 4").expected == "4"


def test_the_only_failing_case_is_not_told() -> None:
    hidden = symptom(6, "AssertionError", "assert 3 == 4", reveal=False)
    assert (hidden.actual, hidden.expected) == ("", "")
    assert symptom(11, "TypeError", "no 'a' here", reveal=False).message == ""


def test_an_error_is_named_with_its_words_and_the_documentation_of_what_is_called() -> None:
    found = symptom(11, "TypeError", "bad operand")
    assert (found.subject, found.error, found.message) == ("clamp", "TypeError", "bad operand")
    assert found.documentation == "Move a value into the range from low to high."


def nameless(message: str, *, reveal: bool) -> Symptom:
    """At a line that calls nothing."""
    return read_symptom("x = 1\n", 1, "AssertionError", message, CODE, project="calc", version="1.0", reveal=reveal)


def test_an_issue_that_names_neither_a_call_nor_what_came_out_of_it_says_too_little() -> None:
    assert symptom(6, "AssertionError", "", reveal=False).says_enough
    assert nameless("assert 3 == 4", reveal=True).says_enough
    assert not nameless("assert 3 == 4", reveal=False).says_enough
    assert not nameless("assert '`' == 'a'", reveal=True).says_enough
    assert not nameless("", reveal=True).says_enough


def test_addresses_and_names_of_tests_are_never_told() -> None:
    assert symptom(6, "AssertionError", "assert <a at 0x7f> == 4").actual == ""
    assert symptom(11, "TypeError", "test_two() failed").message == ""


@pytest.mark.parametrize("style", SYMPTOM_STYLES)
def test_every_style_names_the_subject_and_the_trouble(style: str) -> None:
    text = SYMPTOM_STYLES[style](symptom(11, "TypeError", "bad operand"), random.Random(1))
    assert "clamp" in text
    assert "TypeError" in text
    values = SYMPTOM_STYLES[style](symptom(6, "AssertionError", "assert 3 == 4"), random.Random(1))
    assert "`3`" in values
    assert "`4`" in values


def test_the_same_seed_writes_the_same_text() -> None:
    found = symptom(11, "TypeError", "bad operand")
    texts = {write_symptom(found, random.Random(seed)) for seed in range(20)}
    assert len(texts) >= 5
    assert write_symptom(found, random.Random(3)) == write_symptom(found, random.Random(3))
