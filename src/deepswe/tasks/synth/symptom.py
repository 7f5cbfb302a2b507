"""Issue texts where no failing case can stand alone, or must not be shown because it is the only one.

They say what is called, what its documentation promises, and how it goes wrong: the error, or the two values of the
failing assertion. `reveal` is off where only one test fails: then no value of that test appears.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepswe.tasks.synth.issue import Case, documentation_of, subject_of

_MAX_VALUE = 160
_PAIR = (
    re.compile(r"^assert (?P<actual>.+?) == (?P<expected>.+)$"),
    re.compile(r"^(?P<actual>.+?) != (?P<expected>.+?)(?: : .*)?$"),
)
_UNFIT = (" at 0x", "/tmp/", "/home/", "\x1b", "...", "self.", "test_")


@dataclass(frozen=True, slots=True)
class Symptom:
    """How something goes wrong, seen from outside.

    Attributes:
        subject: dotted name of what is called; "" if unknown.
        documentation: first paragraph of its docstring; "" if there is none.
        error: name of an unexpected exception; "" where a value is wrong.
        message: what that exception says.
        actual, expected: values of the failing assertion; "" where they are unknown.
        project, version: of the repository.
    """

    subject: str
    documentation: str
    error: str
    message: str
    actual: str
    expected: str
    project: str
    version: str

    @property
    def quotes_values(self) -> bool:
        """Whether an issue can quote the two values of the failing assertion."""
        return bool(self.actual) and "`" not in self.actual + self.expected

    @property
    def quotes_message(self) -> bool:
        """Whether an issue can quote what the exception says."""
        return bool(self.message) and "`" not in self.message

    @property
    def says_enough(self) -> bool:
        """Whether an issue would name what is called, or at least what came out of it."""
        return bool(self.subject) or self.quotes_values or self.quotes_message


def read_symptom(
    module: str,
    line: int,
    error: str,
    message: str,
    files: Mapping[str, str],
    *,
    project: str,
    version: str,
    reveal: bool,
) -> Symptom:
    """What a failure shows.

    Args:
        module: text of the test file.
        line: where it failed in that file; 0 if unknown.
        error, message: of the exception that ended the test.
        files: path -> text of the code, for documentation.
        project, version: of the repository.
        reveal: whether values may be told.
    """
    subject = _subject(module, line)
    case = Case((), f"{subject}()") if subject else Case((), "")
    documentation = documentation_of(case, files) if subject else ""
    asserted = error in ("AssertionError", "Failed", "")
    first = message.strip().splitlines()[0].strip() if message.strip() else ""
    actual = expected = ""
    if asserted and reveal:
        actual, expected = _values(first)
    fit = reveal and not any(mark in first for mark in _UNFIT) and len(first) <= _MAX_VALUE
    return Symptom(
        subject,
        documentation,
        "" if asserted else error,
        first if fit and not asserted else "",
        actual,
        expected,
        project,
        version,
    )


def _subject(module: str, line: int) -> str:
    """What the innermost statement at a line calls."""
    holders = [
        node
        for node in ast.walk(ast.parse(module))
        if isinstance(node, ast.stmt)
        and not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not holders:
        return ""
    inner = max(holders, key=lambda node: node.lineno)
    name = subject_of(Case((), ast.unparse(inner))) if isinstance(inner, ast.Expr) else _first_call(inner)
    unfit = name.startswith(("self.", "pytest", "assert")) or "test" in name.lower()
    return "" if unfit or name in ("raises", "approx") else name


def _first_call(statement: ast.stmt) -> str:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = subject_of(Case((), ast.unparse(node)))
            if name and name not in ("raises", "approx"):
                return name
    return ""


def _values(first: str) -> tuple[str, str]:
    for pattern in _PAIR:
        match = pattern.match(first)
        if match:
            values = (match["actual"], match["expected"])
            if all(len(value) <= _MAX_VALUE and not any(mark in value for mark in _UNFIT) for value in values):
                return values
    return "", ""


def write_symptom(symptom: Symptom, rng: random.Random) -> str:
    """An issue in one of several styles."""
    return SYMPTOM_STYLES[rng.choice(sorted(SYMPTOM_STYLES))](symptom, rng).strip() + "\n"


def _name(symptom: Symptom) -> str:
    return f"`{symptom.subject}`" if symptom.subject else symptom.project


def _title(symptom: Symptom, rng: random.Random) -> str:
    name = _name(symptom)
    if symptom.error:
        return rng.choice([f"{name} raises {symptom.error}", f"Unexpected {symptom.error} from {name}"])
    return rng.choice([f"{name} gives wrong results", f"Wrong results from {name}", f"{name}: wrong in some cases"])


def _what(symptom: Symptom) -> str:
    if symptom.error:
        said = f": `{symptom.message}`" if symptom.quotes_message else ""
        return f"For valid input it ends with {symptom.error}{said}."
    if symptom.quotes_values:
        return f"In one of our cases the outcome is `{symptom.actual}`, and it should be `{symptom.expected}`."
    return "The result is not what it should be for some inputs, while most inputs are fine."


def _promise(symptom: Symptom) -> str:
    return f"The documentation says:\n\n> {symptom.documentation}" if symptom.documentation else ""


def _close(rng: random.Random) -> str:
    return rng.choice(
        [
            "I could not reduce it further, sorry.",
            "I have no small script at hand; it shows up in a larger program.",
            "Please check the neighbouring cases, too.",
            "",
        ]
    )


def _plain(symptom: Symptom, rng: random.Random) -> str:
    parts = [f"# {_title(symptom, rng)}", _promise(symptom), _what(symptom), _close(rng)]
    return "\n\n".join(part for part in parts if part)


def _upgrade(symptom: Symptom, rng: random.Random) -> str:
    start = f"After an update to the current sources of {symptom.project} we see a change in {_name(symptom)}."
    parts = [f"**{_title(symptom, rng)}**", start, _what(symptom), _promise(symptom), _close(rng)]
    return "\n\n".join(part for part in parts if part)


def _form(symptom: Symptom, rng: random.Random) -> str:
    expected = symptom.documentation or "The documented behaviour."
    parts = [
        _title(symptom, rng),
        f"**Version**: {symptom.project} {symptom.version}",
        f"**What I expected**: {expected}",
        f"**What happens**: {_what(symptom)}",
        _close(rng),
    ]
    return "\n\n".join(part for part in parts if part)


SYMPTOM_STYLES: Mapping[str, Callable[[Symptom, random.Random], str]] = {
    "plain": _plain,
    "upgrade": _upgrade,
    "form": _form,
}
