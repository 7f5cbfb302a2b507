"""Expected values that never enter the process of the code under test: it tells what it got, and we compare.

Where all that a hidden test says is `self.assertEqual(CALL, LITERAL)`, it is rewritten to tell the value of the call.
The worker reports the value; whether it is the right one is decided here. So whoever forges such a test from inside of
its process must know the right value, which is to solve it.

A value can be told if it is made of None, booleans, numbers, text, bytes, lists, tuples, dictionaries and sets, or of
subclasses of these, whose own equality is not asked. Any other value is not the expected one. That is why only tasks
without an environment are sealed: the standard library alone gives few other values that equal a literal.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepswe.grading.report import Report
from deepswe.tasks.task import HiddenTests

TELL = "__tell__"
"""The name under which the worker offers the function that tells a value; see `runner/unittest_runner.py`."""
FORGED = "forged: a test was reported as passed, but not the value that it asks for"
_BY_NAME = ("assertEqual", "assertEquals")


@dataclass(frozen=True, slots=True)
class Sealed:
    """Hidden files without the expected values of the tests that are sealed.

    Attributes:
        files: path -> text.
        expected: test id -> the value that it must tell.
    """

    files: Mapping[str, str]
    expected: Mapping[str, Any] = field(default_factory=dict)


def seal(hidden: HiddenTests) -> Sealed:
    """Take the expected values out of the hidden tests of a `unittest` run."""
    files, expected = dict(hidden.files), {}
    for path, text in hidden.files.items():
        wanted = tuple(test[len(path) + 2 :] for test in hidden.tests if test.startswith(f"{path}::"))
        if wanted and path.endswith(".py"):
            files[path], values = _seal_file(path, text, wanted)
            expected.update(values)
    return Sealed(files, expected)


@functools.lru_cache(maxsize=256)
def _seal_file(path: str, text: str, wanted: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    if "\r" in text or "\f" in text:
        return text, {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return text, {}
    lines, expected = text.split("\n"), {}
    for owner in tree.body:
        for function in owner.body if isinstance(owner, ast.ClassDef) else ():
            found = _pair(function)
            if found is None or not isinstance(owner, ast.ClassDef) or not isinstance(function, ast.FunctionDef):
                continue
            name, statement, (call, value) = f"{owner.name}::{function.name}", function.body[-1], found
            last = statement.end_lineno or statement.lineno
            if name in wanted and statement.lineno > function.lineno and lines[last - 1].strip().endswith(")"):
                line = " " * statement.col_offset + f"{TELL}({f'{path}::{name}'!r}, {ast.unparse(call)})"
                lines[statement.lineno - 1 : last] = [line, *[""] * (last - statement.lineno)]
                expected[f"{path}::{name}"] = value
    return "\n".join(lines), expected


def _pair(function: ast.stmt) -> tuple[ast.Call, Any] | None:
    """The call and the literal that a test compares, if it does nothing else."""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or len(function.body) != 1:
        return None
    statement = function.body[0]
    check = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(check, ast.Call) and isinstance(check.func, ast.Attribute) and check.func.attr in _BY_NAME):
        return None
    if not isinstance(check.func.value, ast.Name) or check.func.value.id != "self" or check.keywords:
        return None
    if len(check.args) != 2 or not isinstance(check.args[0], ast.Call):
        return None
    try:
        return check.args[0], ast.literal_eval(check.args[1])
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None


def open_seals(report: Report, expected: Mapping[str, Any]) -> Report:
    """The report with a verdict on each sealed test that ran to its end."""
    statuses, details, problem = dict(report.statuses), dict(report.details), report.problem
    for test, value in expected.items():
        if statuses.get(test) != "passed":
            continue
        told = report.values.get(test, ())
        if len(told) != 1:
            problem = problem or FORGED
        elif not _equal(told[0], value):
            statuses[test] = "failed"
            details[test] = f"AssertionError: {told[0][:100]} != {value!r:.100}"
    return Report(
        statuses, details, report.started, report.guarded, report.ended, problem, report.broken, report.values
    )


def _equal(told: str, value: Any) -> bool:
    """Whether a told value is the expected one, by Python's equality of plain values."""
    try:
        return bool(ast.literal_eval(told) == value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
