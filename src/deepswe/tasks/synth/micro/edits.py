"""One-line edits of Python text: the space of bugs of micro repositories, and of a solver's guesses.

An edit changes one token, a pair of operands or a pair of arguments in one line of a function's body (or the default
in its signature). Docstrings and strings are never touched. Each edit has a kind; the kinds in `UNSEEN_KINDS` occur in
no training task, neither as a bug nor as a guess of the reference solver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from deepswe.tasks.synth.micro.templates import Module

UNSEEN_KINDS = frozenset({"flag", "division", "overwrite"})
TRAINING_KINDS = frozenset(
    {
        *("boundary", "direction", "equality", "arithmetic", "augmented", "boolean", "builtin", "method", "constant"),
        *("initial", "index", "slice", "default", "range", "variable", "return", "arguments", "operands", "negation"),
    }
)

KIND_WEIGHTS: Mapping[str, float] = {
    **dict.fromkeys(("constant", "variable", "default", "range"), 0.2),
    **dict.fromkeys(("return", "initial"), 0.5),
}
"""How often a kind is drawn where it is possible; 1 where it is not named here. These ask mostly for the copy of a name
or a number, the others for a judgement on what the docstring says."""

_TOKEN = re.compile(r'"[^"\n]*"|\w+|-\d+|[<>=!+\-*/%]=|//|\S')
_SWAPS: dict[str, tuple[tuple[str, str], ...]] = {
    "<": (("<=", "boundary"), (">", "direction")),
    "<=": (("<", "boundary"), (">=", "direction")),
    ">": ((">=", "boundary"), ("<", "direction")),
    ">=": ((">", "boundary"), ("<=", "direction")),
    "==": (("!=", "equality"),),
    "!=": (("==", "equality"),),
    "+": (("-", "arithmetic"), ("*", "arithmetic")),
    "-": (("+", "arithmetic"),),
    "*": (("+", "arithmetic"),),
    "//": (("%", "division"),),
    "%": (("//", "division"),),
    "+=": (("-=", "augmented"), ("=", "overwrite")),
    "-=": (("+=", "augmented"), ("=", "overwrite")),
    "*=": (("+=", "augmented"), ("=", "overwrite")),
    "and": (("or", "boolean"),),
    "or": (("and", "boolean"),),
    "min": (("max", "builtin"),),
    "max": (("min", "builtin"),),
    "any": (("all", "builtin"),),
    "all": (("any", "builtin"),),
    "sum": (("len", "builtin"),),
    "len": (("sum", "builtin"),),
    "upper": (("lower", "method"),),
    "lower": (("upper", "method"),),
    "lstrip": (("rstrip", "method"),),
    "rstrip": (("lstrip", "method"),),
    "startswith": (("endswith", "method"),),
    "endswith": (("startswith", "method"),),
    "True": (("False", "flag"),),
    "False": (("True", "flag"),),
}
_INITIAL = re.compile(r"\s+\w+ = -?\d+$")
_DEFAULT = re.compile(r"=(\d+)")
_NUMBER = re.compile(r"-?\d+")
_DIFFERENCE = re.compile(r"\b(\w+) - (\w+)\b")
_CALL = re.compile(r"\b(\w+_\w+)\((\w+), (\w+)\)")
_SLICE = re.compile(r"\[(\w*):(\w*)\]")
_RANGE = re.compile(r"range\((\w+)\)")
_RANGE_FROM_1 = re.compile(r"range\(1, (\w+)\)")
_RANGE_TO = re.compile(r"(range\(\w+, \w+)( \+ 1)?\)")
_IF_NOT = re.compile(r"\bif not ")
_IF = re.compile(r"\s+if (?!not )")
_COMPARISONS = frozenset({"<", "<=", ">", ">=", "==", "!="})


@dataclass(frozen=True, slots=True)
class Edit:
    """One changed line.

    Attributes:
        line: index of the line in the module, from 0.
        text: the line after the edit, with its indentation.
        kind: what sort of change it is.
    """

    line: int
    text: str
    kind: str


def draw_kind(kinds: Iterable[str], random: Random) -> str:
    """One of the kinds, by their weights; the same for the same set, in whatever order."""
    found = sorted(set(kinds))
    return random.choices(found, [KIND_WEIGHTS.get(kind, 1.0) for kind in found])[0]


def apply(module: Module, edit: Edit) -> Module:
    """The module after the edit."""
    return module.with_line(edit.line, edit.text)


def edits(module: Module, function: str, line: int | None = None) -> tuple[Edit, ...]:
    """Every edit of one function, in the order of the text.

    Args:
        module: a generated one.
        function: name of a function at its top level.
        line: index of the only line to edit, if not all.
    """
    outline = next(found for found in module.outlines() if found.name == function)
    lines = module.lines
    found: list[Edit] = []
    for index in (outline.first, *range(outline.body, outline.end)) if line is None else (line,):
        if index == outline.first:
            found += _defaults(lines[index], index)
        elif index >= outline.body:
            found += _line_edits(lines[index], index, outline.names)
    unique = {(edit.line, edit.text): edit for edit in reversed(found) if edit.text != lines[edit.line]}
    return tuple(sorted(unique.values(), key=lambda e: (e.line, e.text)))


def _defaults(line: str, index: int) -> Iterator[Edit]:
    for match in _DEFAULT.finditer(line):
        for value in _neighbours(int(match[1])):
            yield Edit(index, f"{line[: match.start(1)]}{value}{line[match.end(1) :]}", "default")


def _neighbours(value: int) -> tuple[int, ...]:
    return (value + 1, value - 1) if value > 0 else (value + 1,)


def _line_edits(line: str, index: int, names: tuple[str, ...]) -> Iterator[Edit]:
    tokens = list(_TOKEN.finditer(line))
    texts = [token[0] for token in tokens]
    for place, token in enumerate(tokens):
        for replacement, kind in _replacements(line, texts, place, names):
            yield Edit(index, line[: token.start()] + replacement + line[token.end() :], kind)
    yield from _wider_edits(line, index)


def _replacements(line: str, texts: list[str], place: int, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    text = texts[place]
    yield from _SWAPS.get(text, ())
    if _NUMBER.fullmatch(text):
        yield from _other_numbers(line, texts, place)
    elif text in names and not _is_target(texts, place):
        kind = "return" if texts[0] == "return" and len(texts) == 2 else "variable"
        yield from ((name, kind) for name in names if name != text)


def _other_numbers(line: str, texts: list[str], place: int) -> Iterator[tuple[str, str]]:
    before = texts[place - 1] if place else ""
    after = texts[place + 1] if place + 1 < len(texts) else ""
    value = int(texts[place])
    if before == "[" and after == "]":
        yield from ((str(other), "index") for other in (0, -1, 1) if other != value)
        return
    if _INITIAL.match(line):
        kind = "initial"
    elif "get" in texts[:place] and before == ",":
        kind = "default"
    elif "range" in texts[:place]:
        kind = "range"
    else:
        kind = "constant"
    yield from ((str(other), kind) for other in _neighbours(value))


def _is_target(texts: list[str], place: int) -> bool:
    after = texts[place + 1] if place + 1 < len(texts) else ""
    before = texts[place - 1] if place else ""
    return after in {"=", "+=", "-=", "*=", "("} or before == "for" or (after == "." and texts[place + 2] == "append")


def _wider_edits(line: str, index: int) -> Iterator[Edit]:
    for match in _DIFFERENCE.finditer(line):
        if not match[2].isdigit():
            yield _spliced(line, index, match, f"{match[2]} - {match[1]}", "operands")
    for match in _CALL.finditer(line):
        yield _spliced(line, index, match, f"{match[1]}({match[3]}, {match[2]})", "arguments")
    for match in _SLICE.finditer(line):
        yield _spliced(line, index, match, f"[{match[2]}:{match[1]}]", "slice")
    for match in _RANGE.finditer(line):
        yield _spliced(line, index, match, f"range(1, {match[1]})", "range")
    for match in _RANGE_FROM_1.finditer(line):
        yield _spliced(line, index, match, f"range({match[1]})", "range")
    for match in _RANGE_TO.finditer(line):
        yield _spliced(line, index, match, match[1] + ("" if match[2] else " + 1") + ")", "range")
    for match in _IF_NOT.finditer(line):
        yield _spliced(line, index, match, "if ", "negation")
    if _IF.match(line) and not _COMPARISONS & set(line.split()):
        yield Edit(index, line.replace("if ", "if not ", 1), "negation")


def _spliced(line: str, index: int, match: re.Match[str], text: str, kind: str) -> Edit:
    return Edit(index, line[: match.start()] + text + line[match.end() :], kind)
