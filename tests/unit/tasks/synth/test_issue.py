from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping

import pytest

from deepswe.tasks.synth.issue import (
    STYLES,
    Case,
    Outcome,
    Sight,
    documentation_of,
    extract_case,
    read_replay,
    replay_script,
    subject_of,
    write_issue,
)

MODULE = """import os
from calc import add, Table
from helpers import thing

LIMIT = 3


def double(x):
    return 2 * x


def test_plain():
    unrelated = 5
    assert add(1, 1) == 2
    assert add(double(LIMIT), 2) == 8


def test_result_name():
    result = add(1, 2)
    assert result == 3


def test_state():
    table = Table()
    table.insert("a")
    assert table.rows() == ["a"]


def test_param(args, expected):
    assert add(*args) == expected


def test_fixture(tmp_path):
    assert add(tmp_path, 1) == 2


def test_support():
    assert thing(add(1, 2)) == 3


def test_raises():
    with raises(ValueError):
        add(None, 1)


class TestClass:
    def test_method(self):
        self.assertEqual(add(4, 5), 9)
"""


def case_of(test: str, text: str, parameters: Mapping[str, str | None] | None = None) -> Case | None:
    line = 1 + next(number for number, row in enumerate(MODULE.splitlines()) if row.strip() == text)
    return extract_case(MODULE, f"tests/test_calc.py::{test}", line, parameters or {}, ["helpers"])


def test_case_holds_what_the_failing_line_needs_and_nothing_else() -> None:
    case = case_of("test_plain", "assert add(double(LIMIT), 2) == 8")
    assert case is not None
    assert case.expression == "add(double(LIMIT), 2)"
    assert set(case.setup) == {"from calc import add", "LIMIT = 3", "def double(x):\n    return 2 * x"}


def test_name_that_was_just_assigned_is_put_in_place() -> None:
    case = case_of("test_result_name", "assert result == 3")
    assert case == Case(("from calc import add",), "add(1, 2)")


def test_calls_for_their_effect_are_kept() -> None:
    case = case_of("test_state", 'assert table.rows() == ["a"]')
    assert case == Case(("from calc import Table", "table = Table()", "table.insert('a')"), "table.rows()")


def test_parameters_become_literals_and_starred_ones_arguments() -> None:
    case = case_of("test_param[0]", "assert add(*args) == expected", {"args": "(1, 'x')", "expected": "3"})
    assert case == Case(("from calc import add",), "add(1, 'x')")


def test_body_of_raises_and_of_assert_equal_is_what_is_shown() -> None:
    raised = case_of("test_raises", "add(None, 1)")
    equal = case_of("TestClass::test_method", "self.assertEqual(add(4, 5), 9)")
    assert raised is not None
    assert raised.expression == "add(None, 1)"
    assert equal is not None
    assert equal.expression == "add(4, 5)"


@pytest.mark.parametrize(
    ("test", "text", "parameters"),
    [
        ("test_fixture", "assert add(tmp_path, 1) == 2", {}),
        ("test_support", "assert thing(add(1, 2)) == 3", {}),
        ("test_param[0]", "assert add(*args) == expected", {"args": None, "expected": "3"}),
    ],
)
def test_case_that_cannot_stand_alone_is_none(test: str, text: str, parameters: dict[str, str | None]) -> None:
    assert case_of(test, text, parameters) is None


def replay(case: Case) -> Outcome | None:
    done = subprocess.run([sys.executable, "-c", replay_script(case)], capture_output=True, text=True, check=True)
    return read_replay(done.stdout)


def test_replay_tells_values_texts_and_errors() -> None:
    assert replay(Case((), "[1, 2]")) == Outcome("[1, 2]")
    assert replay(Case(("import os",), "'a' + os.sep")) == Outcome("'a/'", text="a/")
    assert replay(Case((), "{}['k']")) == Outcome(error="KeyError: 'k'")


def test_replay_of_an_address_or_a_flood_is_none() -> None:
    assert replay(Case((), "object()")) is None
    assert replay(Case((), "'x' * 5000")) is None
    assert read_replay("") is None
    assert read_replay("no json") is None
    assert read_replay(json.dumps({"value": "", "error": "", "text": None})) is None


def test_subject_is_what_the_case_calls_beyond_conversions() -> None:
    assert subject_of(Case((), "list(calc.add(1, 2))")) == "calc.add"
    assert subject_of(Case(("x = Table()",), "x")) == "Table"
    assert subject_of(Case(("x = calc.Table()",), "x.insert(1)")) == "insert"
    assert subject_of(Case((), "1")) == ""


def test_documentation_is_the_first_paragraph_where_the_name_is_unique() -> None:
    files = {"calc.py": 'def add(a, b):\n    """Return the sum of\n    two numbers.\n\n    More."""\n'}
    assert documentation_of(Case((), "add(1, 2)"), files) == "Return the sum of two numbers."
    assert documentation_of(Case((), "add(1, 2)"), {**files, "other.py": files["calc.py"]}) == ""


SIGHTS = [
    Sight(Case(("from calc import add",), "add(1, 2)"), Outcome("3"), Outcome("4"), "Return the sum.", "1.0", "calc"),
    Sight(Case((), "add(1, 2)"), Outcome("3"), Outcome(error="TypeError: no"), "Return the sum.", "1.0", "calc"),
    Sight(Case((), "add(1)"), Outcome(error="ValueError: bad"), Outcome("None"), "Return the sum.", "1.0", "calc"),
    Sight(Case((), "add(1)"), Outcome("'a\\nb'", text="a\nb"), Outcome("'a\\nc'", text="a\nc"), "Sum.", "1.0", "calc"),
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_every_style_shows_the_code_and_both_outcomes(style: str, sight: Sight) -> None:
    text = STYLES[style](sight, random.Random(1))
    assert sight.case.expression in text
    for outcome in (sight.expected, sight.actual):
        lines = (outcome.text or outcome.error or outcome.value).splitlines()
        assert outcome.value == "None" or outcome.value in text or all(line in text for line in lines)


def test_the_same_seed_gives_the_same_issue_and_other_seeds_other_styles() -> None:
    texts = [write_issue(SIGHTS[0], random.Random(seed)) for seed in range(40)]
    assert texts == [write_issue(SIGHTS[0], random.Random(seed)) for seed in range(40)]
    assert len({text.splitlines()[0] for text in texts}) >= 5
