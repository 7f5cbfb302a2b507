from __future__ import annotations

import ast
from typing import Any

import pytest

from deepswe.grading.report import Report
from deepswe.grading.sealed import FORGED, open_seals, seal
from deepswe.tasks.synth.micro.generate import micro_task
from deepswe.tasks.task import HiddenTests

FILE = """import unittest
from shop import double


class A(unittest.TestCase):
    def test_a(self):
        self.assertEqual(
            double(5),
            [10, "x"],
        )

    def test_b(self):
        x = double(5)
        self.assertEqual(x, 10)

    def test_c(self):
        self.assertEqual(double(1), double(2))
"""
IDS = ("t.py::A::test_a", "t.py::A::test_b", "t.py::A::test_c")
HIDDEN = HiddenTests("t", {"t.py": FILE, "data": "x"}, IDS, (), "unittest")


def test_only_a_test_that_is_one_comparison_with_a_literal_is_sealed() -> None:
    sealed = seal(HIDDEN)
    assert sealed.expected == {IDS[0]: [10, "x"]}
    text = sealed.files["t.py"]
    assert "__tell__('t.py::A::test_a', double(5))" in text
    assert "[10" not in text
    assert text.count("\n") == FILE.count("\n")
    assert [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)] == [6, 12, 16]


def test_no_expected_value_of_a_micro_task_enters_its_sandbox() -> None:
    _, hidden = micro_task("heldout", 3, seed=0)
    sealed = seal(hidden)
    assert set(sealed.expected) == set(hidden.tests)
    assert "assertEqual" not in "".join(sealed.files.values())


def opened(told: tuple[str, ...], value: Any = 10, status: str = "passed") -> Report:
    report = Report({"a": status}, started=True, values={"a": told})
    return open_seals(report, {"a": value})


@pytest.mark.parametrize(("told", "value"), [("10", 10), ("True", 1), ("[1, (2, )]", [1, (2,)]), ("set()", set())])
def test_the_right_value_passes(told: str, value: Any) -> None:
    assert opened((told,), value) == Report({"a": "passed"}, started=True, values={"a": (told,)})


@pytest.mark.parametrize(
    "told", ["11", "'10'", "<a value of the class Any>", "__import__('os')", "[" * 99, "10 10", ""]
)
def test_any_other_value_fails(told: str) -> None:
    assert opened((told,)).statuses == {"a": "failed"}
    assert "!= 10" in opened((told,)).details["a"]


def test_a_pass_without_its_one_value_is_forged() -> None:
    assert opened(()).problem == FORGED
    assert opened(("10", "10")).problem == FORGED
    assert opened((), status="failed").problem == ""
