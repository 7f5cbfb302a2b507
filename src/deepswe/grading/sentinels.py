"""Tests that must fail, mixed among the hidden tests of one grading: what passes tests wholesale passes these too.

Where a hidden test ends in an equality with a literal, its sentinel is a copy with another literal of the same type:
code that returns one value cannot pass both, code that returns "equal to all" or a framework that passes everything
does. Elsewhere the sentinel compares a name that the test file imports with a value drawn anew. Names continue those
of the tests beside them; values and places are drawn for each grading, and only the supervisor knows which is which.

A copy must fail on right code, so only such tests are copied whose last statement is reached if they pass: plain
functions without decorators, `return` or `yield`.
"""

from __future__ import annotations

import ast
import functools
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepswe.tasks.task import HiddenTests

PER_FILE = 2
_EQUAL_TO_ALL = ("mock", "unittest.mock", "dirty_equals")
"""Modules whose names may be equal to anything, so that no comparison with them must fail."""
_WORDS = ("again", "basic", "case", "cases", "edge", "input", "large", "more", "other", "simple", "small", "values")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Hidden tests with sentinels among them.

    Attributes:
        files: path -> text, of all hidden files.
        tests: ids to run, in order.
        sentinels: those of them that must not pass.
    """

    files: Mapping[str, str]
    tests: tuple[str, ...]
    sentinels: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sentinel goes: behind the line `line` of the file, in the class named by `owner`, or in none."""

    owner: str
    line: int
    indent: str
    taken: frozenset[str]


def mix_sentinels(hidden: HiddenTests, rng: random.Random) -> Mixed:
    """Add sentinels to every hidden file that holds a wanted test; a file that cannot be read as Python stays as it is.

    A sentinel runs after the test that it was made from, so that it finds what that test found. None is made from a
    test that must not pass, such as one that is skipped: it would not run either.

    Args:
        hidden: whose files and tests; nothing of it is changed.
        rng: draws names, values and places; fresh for each grading.
    """
    files, order, made = dict(hidden.files), list(hidden.tests), set()
    for path in dict.fromkeys(test.split("::")[0] for test in hidden.tests):
        if not path.endswith(".py") or path not in files:
            continue
        passing = [test for test in hidden.tests if hidden.expected.get(test, "passed") == "passed"]
        wanted = tuple(test[len(path) + 2 :] for test in passing if test.split("::")[0] == path)
        urgent = {test[len(path) + 2 :] for test in hidden.fail_to_pass}
        text, added = add_sentinels(files[path], wanted, urgent, rng, pytest=hidden.runner == "pytest")
        files[path] = text
        for name, template in added.items():
            first = order.index(f"{path}::{template}") + 1
            last = max(order.index(f"{path}::{other}") for other in wanted) + 1
            order.insert(rng.randint(first, last), f"{path}::{name}")
            made.add(f"{path}::{name}")
    return Mixed(files, tuple(order), frozenset(made))


def add_sentinels(
    text: str, wanted: tuple[str, ...], urgent: Collection[str], rng: random.Random, *, pytest: bool
) -> tuple[str, dict[str, str]]:
    """A test file with sentinels in it; the text as it is where none can be added.

    Args:
        text: of the file.
        wanted: ids of its tests, without the path.
        urgent: the tests to copy first, those that a wrong patch does not pass.
        rng: draws.
        pytest: functions outside of classes are tests too.

    Returns:
        The text, and the ids of the sentinels, each with that of the test that it was made from.
    """
    tree, templates = _analyse(text, wanted, pytest)
    drawn = rng.sample(templates, len(templates))
    drawn.sort(key=lambda pair: _id(*pair) not in urgent)
    copies = [pair for pair in drawn if _can_be_copied(pair[1])]
    chosen: list[tuple[_Place, str, str]] = []
    made: dict[str, str] = {}
    for place, function in (copies or drawn)[: PER_FILE if copies else 1]:
        name = _new_name(function.name, place, chosen, rng)
        body = _copy(function, name, rng) if copies else _plain(tree, function, name, place, rng)
        chosen.append((place, name, body))
        made[f"{place.owner}::{name}" if place.owner else name] = _id(place, function)
    return _insert(text, chosen) if chosen else text, made


@functools.lru_cache(maxsize=64)
def _analyse(text: str, wanted: tuple[str, ...], pytest: bool) -> tuple[ast.Module, list[tuple[_Place, _Function]]]:
    """A test file, and the wanted tests of it beside which a sentinel can stand."""
    nothing = ast.Module([], [])
    if "\r" in text.replace("\r\n", ""):
        return nothing, []
    try:
        tree = ast.parse(text)
        templates = [pair for pair in _functions(tree, pytest) if _id(*pair) in wanted]
        ast.parse(_insert(text, [(place, "x", "def x():\n    pass") for place, _ in templates]))
    except (SyntaxError, ValueError, RecursionError):
        return nothing, []
    return tree, templates


def _functions(tree: ast.Module, pytest: bool) -> list[tuple[_Place, _Function]]:
    found: list[tuple[_Place, _Function]] = []
    top = [node for node in tree.body if isinstance(node, _Function)]
    if pytest:
        names = frozenset(_names(tree.body))
        found += [(_Place("", 0, "", names), function) for function in top]
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and owner.body[0].lineno > owner.lineno and owner.end_lineno:
            place = _Place(owner.name, owner.end_lineno, " " * owner.body[0].col_offset, frozenset(_names(owner.body)))
            found += [(place, function) for function in owner.body if isinstance(function, _Function)]
    return found


def _names(body: Sequence[ast.stmt]) -> list[str]:
    return [node.name for node in body if isinstance(node, _NAMED)]


def _id(place: _Place, function: _Function) -> str:
    return f"{place.owner}::{function.name}" if place.owner else function.name


def _last_literal(function: _Function) -> tuple[ast.AST, str, int] | None:
    """Where the literal stands that the last statement of a test compares with: node, field, index; None if nowhere."""
    if function.decorator_list or not isinstance(function, ast.FunctionDef):
        return None
    leaving = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal)
    if any(isinstance(node, leaving) for node in ast.walk(function)):
        return None
    last = function.body[-1]
    if isinstance(last, ast.Assert) and isinstance(last.test, ast.Compare) and len(last.test.ops) == 1:
        compare = last.test
        if isinstance(compare.ops[0], ast.Eq):
            if _changeable(compare.comparators[0]) and not _changeable(compare.left):
                return compare, "comparators", 0
            if _changeable(compare.left) and not _changeable(compare.comparators[0]):
                return compare, "left", -1
    call = last.value if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) else None
    if call and isinstance(call.func, ast.Attribute) and call.func.attr in ("assertEqual", "assertEquals"):
        literal = [number for number, argument in enumerate(call.args[:2]) if _changeable(argument)]
        if len(literal) == 1 and len(call.args) >= 2:
            return call, "args", literal[0]
    return None


@functools.lru_cache(maxsize=1024)
def _can_be_copied(function: _Function) -> bool:
    return _last_literal(function) is not None


@functools.lru_cache(maxsize=1024)
def _source(function: _Function) -> str:
    return ast.unparse(function)


def _changeable(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return False
    return True


def other_value(value: Any, rng: random.Random) -> Any:
    """A value of the same type, as literals have them, that is certainly not equal; drawn from a large range."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return type(value)(rng.randint(10**6, 10**9) * 1.0 + 0.5) if isinstance(value, float) else value + _large(rng)
    if isinstance(value, str):
        return value + "".join(rng.choices("abcdefghjkmnpqrstuvwxyz", k=4))
    if isinstance(value, bytes):
        return value + bytes(rng.choices(range(97, 123), k=4))
    if isinstance(value, (list, tuple)) and value:
        at = rng.randrange(len(value))
        return type(value)([*value[:at], other_value(value[at], rng), *value[at + 1 :]])
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {**value, key: other_value(value[key], rng)}
    if isinstance(value, (list, tuple)):
        return type(value)([_large(rng)])
    if isinstance(value, dict):
        return {_large(rng): _large(rng)}
    if isinstance(value, (set, frozenset)):
        return type(value)([*value, _large(rng)])
    return _large(rng)


def _large(rng: random.Random) -> int:
    return rng.randint(10**3, 10**7)


def _new_name(name: str, place: _Place, chosen: Sequence[tuple[_Place, str, str]], rng: random.Random) -> str:
    """A name that continues the ones beside it."""
    taken = set(place.taken) | {other for _, other, _ in chosen}
    number = re.fullmatch(r"(.*?)(\d+)", name)
    if number:
        known = [re.fullmatch(re.escape(number[1]) + r"(\d+)", other) for other in taken]
        largest = max(int(match[1]) for match in known if match)
        return f"{number[1]}{str(largest + rng.randint(1, 3)).zfill(len(number[2]))}"
    while True:
        found = f"{name}_{rng.choice(_WORDS)}" if rng.random() < 0.8 else f"{name}_{rng.randint(2, 9)}"
        if found not in taken:
            return found
        name = found


def _copy(function: _Function, name: str, rng: random.Random) -> str:
    """The source of a copy with another literal at its end."""
    copied = ast.parse(_source(function)).body[0]
    assert isinstance(copied, ast.FunctionDef)
    copied.name = name
    if len(copied.body) > 1 and ast.get_docstring(copied, clean=False) is not None:
        del copied.body[0]
    found = _last_literal(copied)
    assert found is not None
    node, field, index = found
    old = getattr(node, field) if index < 0 else getattr(node, field)[index]
    new = ast.parse(repr(other_value(ast.literal_eval(old), rng)), mode="eval").body
    if index < 0:
        setattr(node, field, new)
    else:
        getattr(node, field)[index] = new
    return ast.unparse(copied)


def _plain(tree: ast.Module, function: _Function, name: str, place: _Place, rng: random.Random) -> str:
    """A test that compares what the file imports with a value of no meaning."""
    word = "".join(rng.choices("abcdefghjkmnpqrstuvwxyz", k=8))
    value = rng.choice([repr(word), str(_large(rng)), f"[{_large(rng)}]"])
    imported = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", *_EQUAL_TO_ALL)
        for alias in node.names
        if alias.name != "*"
    ]
    subject = rng.choice(imported) if imported else f"len({value!r})"
    arguments = "self" if place.owner else ""
    unittest = place.owner and "self.assert" in _source(function)
    check = f"self.assertEqual({subject}, {value})" if unittest else f"assert {subject} == {value}"
    return f"def {name}({arguments}):\n    {check}"


def _insert(text: str, chosen: Sequence[tuple[_Place, str, str]]) -> str:
    lines = text.split("\n")
    end = len(lines)
    for place, _, source in sorted(chosen, key=lambda item: item[0].line or end, reverse=True):
        body = [place.indent + line if line else line for line in source.split("\n")]
        gap = [""] if place.owner else ["", ""]
        at = place.line or end
        lines[at:at] = [*gap, *body]
    return "\n".join(lines) + ("" if text.endswith("\n") and lines[-1] == "" else "\n")
