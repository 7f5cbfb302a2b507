"""The structures of functions: what a micro repository is made of.

A structure is a template: a docstring that says what the function does, its body, and the types of its arguments.
Placeholders: `{f}` the function's name, `{a}` `{b}` `{c}` its parameters, `{k}` `{m}` constants, `{g}` the name of a
second function in the same module. Most structures are compositions "aggregate-condition" (what is gathered, over
which items); the others are single templates.

Held-out structures: the compositions where (row + column) leaves 0 modulo 4 in the tables below, and the single
templates marked so. Training never sees one of them, neither as the function with the bug nor beside it; it does see
each aggregate and each condition in other compositions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from deepswe.tasks.synth.micro.naming import Namer

Value = int | str | list[int] | list[str] | dict[str, int]
TEXTS = ("ab", "abc", "Abba", "bab", "CAB", " ab", "ba ", "cc", "Bca", "acb")


@dataclass(frozen=True, slots=True)
class Shape:
    """A structure.

    Attributes:
        name: unique.
        document: its docstring.
        body: lines below the docstring, indented by four.
        arguments: type of each argument: "number", "numbers", "text", "texts", "table" or "key".
        heldout: training never sees it.
        defaults: `{k}` is the default of the last parameter.
        helper: name of the shape of `{g}`, which stands above it in the same module, or "".
    """

    name: str
    document: str
    body: str
    arguments: tuple[str, ...]
    heldout: bool = False
    defaults: bool = False
    helper: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a module, right.

    Attributes:
        name: its name.
        shape: the structure.
        source: its text, without a final newline.
        sample: draws arguments near its constants.
    """

    name: str
    shape: Shape
    source: str
    sample: Callable[[Random], tuple[Value, ...]]


_AGGREGATES = (
    ("count", "Count {a} {where}.", "count = 0", "count += 1", "return count"),
    ("total", "Sum of {a} {where}.", "total = 0", "total += item", "return total"),
    ("scaled", "Sum of {a} {where}, each times {m}.", "total = 0", "total += item * {m}", "return total"),
    ("raised", "Sum of {a} {where}, each plus {m}.", "total = 0", "total += item + {m}", "return total"),
    ("product", "Product of {a} {where}.", "result = 1", "result *= item", "return result"),
    ("spent", "{m} minus each of {a} {where}.", "rest = {m}", "rest -= item", "return rest"),
    ("kept", "List of {a} {where}.", "kept = []", "kept.append(item)", "return kept"),
    ("lifted", "List of {a} {where}, each plus {m}.", "kept = []", "kept.append(item + {m})", "return kept"),
    ("last", "Last of {a} {where}, or 0.", "last = 0", "last = item", "return last"),
    ("found", "First of {a} {where}, or {m}.", "", "return item", "return {m}"),
)
_CONDITIONS = (
    ("above", "above {b}", "item > {b}", 1),
    ("below", "below {b}", "item < {b}", 1),
    ("atleast", "at least {b}", "item >= {b}", 1),
    ("atmost", "at most {b}", "item <= {b}", 1),
    ("equal", "equal to {b}", "item == {b}", 1),
    ("other", "other than {b}", "item != {b}", 1),
    ("over", "above {k}", "item > {k}", 0),
    ("upto", "at most {k}", "item <= {k}", 0),
    ("inside", "at least {b} and at most {c}", "item >= {b} and item <= {c}", 2),
    ("outside", "below {b} or above {c}", "item < {b} or item > {c}", 2),
)


def _composition(row: int, column: int) -> Shape:
    name, document, start, step, end = _AGGREGATES[row]
    condition, where, test, extra = _CONDITIONS[column]
    lines = [start, "for item in {a}:", f"    if {test}:", f"        {step}", end]
    return Shape(
        name=f"{name}-{condition}",
        document=document.replace("{where}", where),
        body="\n".join(line for line in lines if line),
        arguments=("numbers", *["number"] * extra),
        heldout=(row + column) % 4 == 0,
    )


_N, _NN, _NNN = ("number",), ("number", "number"), ("number", "number", "number")
_SINGLES = (
    Shape("plus", "{a} plus {b} plus {k}.", "return {a} + {b} + {k}", _NN),
    Shape("minus", "{a} minus {b}.", "return {a} - {b}", _NN),
    Shape("times_plus", "{a} times {b} plus {k}.", "return {a} * {b} + {k}", _NN),
    Shape("times_minus", "{a} times {k} minus {b}.", "return {a} * {k} - {b}", _NN, heldout=True),
    Shape("scaled_difference", "{a} minus {b}, times {k}.", "gap = {a} - {b}\nreturn gap * {k}", _NN),
    Shape("scaled_sum", "{a} plus {b}, times {k}.", "total = {a} + {b}\nreturn total * {k}", _NN, heldout=True),
    Shape("larger", "The larger of {a} and {b}, plus {k}.", "return max({a}, {b}) + {k}", _NN),
    Shape("smaller", "The smaller of {a} and {b}, minus {k}.", "return min({a}, {b}) - {k}", _NN),
    Shape("larger_minus", "The larger of {a} and {b}, minus {k}.", "best = max({a}, {b})\nreturn best - {k}", _NN,
          heldout=True),
    Shape("cap", "{a}, but at most {k}.", "return min({a}, {k})", _N),
    Shape("floor", "{a}, but at least {k}.", "return max({a}, {k})", _N),
    Shape("share", "{a} divided by {k}, rounded down, plus {b}.", "return {a} // {k} + {b}", _NN),
    Shape("remainder", "Remainder of {a} divided by {k}, plus {b}.", "return {a} % {k} + {b}", _NN),
    Shape("bonus", "{a} plus {k} if {a} is above {b}, else {a}.",
          "if {a} > {b}:\n    return {a} + {k}\nreturn {a}", _NN),
    Shape("cut", "{a} minus {k} if {a} is at least {b}, else {a}.",
          "if {a} >= {b}:\n    return {a} - {k}\nreturn {a}", _NN),
    Shape("charge", "{a} times {k} if {a} is below {b}, else {b}.",
          "if {a} < {b}:\n    return {a} * {k}\nreturn {b}", _NN, heldout=True),
    Shape("both", "Whether {a} is above {k} and {b} is below {m}.", "return {a} > {k} and {b} < {m}", _NN),
    Shape("either", "Whether {a} is at most {k} or {b} is at least {m}.", "return {a} <= {k} or {b} >= {m}", _NN),
    Shape("same", "Whether {a} plus {k} is equal to {b}.", "return {a} + {k} == {b}", _NN),
    Shape("first", "First of {a}, plus {k}.", "return {a}[0] + {k}", ("numbers",)),
    Shape("final", "Last of {a}, plus {b}.", "return {a}[-1] + {b}", ("numbers", "number")),
    Shape("ends", "First of {a} minus last of {a}.", "head = {a}[0]\ntail = {a}[-1]\nreturn head - tail", ("numbers",)),
    Shape("second", "Second of {a}, times {k}.", "return {a}[1] * {k}", ("numbers",), heldout=True),
    Shape("spread", "Largest of {a} minus smallest of {a}.", "top = max({a})\nlow = min({a})\nreturn top - low",
          ("numbers",)),
    Shape("sum_all", "Sum of {a}, plus {k}.", "return sum({a}) + {k}", ("numbers",)),
    Shape("length", "Number of {a}, times {k}.", "return len({a}) * {k}", ("numbers",)),
    Shape("every", "Whether every one of {a} is above {k}.", "return all(item > {k} for item in {a})", ("numbers",)),
    Shape("some", "Whether any of {a} is below {b}.", "return any(item < {b} for item in {a})", ("numbers", "number")),
    Shape("steps", "Sum of the numbers from {k} to {a}.",
          "total = 0\nfor step in range({k}, {a} + 1):\n    total += step\nreturn total", _N),
    Shape("powers", "{b} times {k}, {a} times over.",
          "result = {b}\nfor step in range({a}):\n    result *= {k}\nreturn result", ("small", "number")),
    Shape("rest", "{a} without its first {k}.", "return {a}[{k}:]", ("numbers",)),
    Shape("lead", "First {k} of {a}.", "return {a}[:{k}]", ("numbers",)),
    Shape("rising", "{a} sorted, smallest first.", "return sorted({a}, reverse=False)", ("numbers",)),
    Shape("falling", "{a} sorted, largest first.", "return sorted({a}, reverse=True)", ("numbers",)),
    Shape("upper", "{a} in upper case, then {b}.", "return {a}.upper() + {b}", ("text", "text")),
    Shape("lower", "{a} in lower case, then {b}.", "return {a}.lower() + {b}", ("text", "text")),
    Shape("lower_all", "List of {a} in lower case.",
          "kept = []\nfor item in {a}:\n    kept.append(item.lower())\nreturn kept", ("texts",), heldout=True),
    Shape("starts", "Count {a} that start with {b}.",
          "count = 0\nfor item in {a}:\n    if item.startswith({b}):\n        count += 1\nreturn count",
          ("texts", "letter")),
    Shape("ends_not", "List of {a} that do not end with {b}.",
          "kept = []\nfor item in {a}:\n    if not item.endswith({b}):\n        kept.append(item)\nreturn kept",
          ("texts", "letter")),
    Shape("starts_not", "Count {a} that do not start with {b}.",
          "count = 0\nfor item in {a}:\n    if not item.startswith({b}):\n        count += 1\nreturn count",
          ("texts", "letter"), heldout=True),
    Shape("left", "{a} without blanks at its start.", "return {a}.lstrip()", ("text",)),
    Shape("right", "{a} without blanks at its end.", "return {a}.rstrip()", ("text",)),
    Shape("lookup", "Value of {b} in {a}, or {k}.", "return {a}.get({b}, {k})", ("table", "key")),
    Shape("lookup_plus", "Value of {b} in {a}, or 0, plus {k}.", "return {a}.get({b}, 0) + {k}", ("table", "key"),
          heldout=True),
    Shape("stock", "Whether the value of {b} in {a}, or 0, is at least {k}.",
          "value = {a}.get({b}, 0)\nreturn value >= {k}", ("table", "key")),
    Shape("default_plus", "{a} plus {b}, which is {k} if not given.", "return {a} + {b}", _NN, defaults=True),
    Shape("default_times", "{a} times {b}, which is {k} if not given.", "return {a} * {b}", _NN, defaults=True),
    Shape("calls_minus", "{g} of {a} and {b}, plus {k}.", "return {g}({a}, {b}) + {k}", _NN, helper="minus"),
    Shape("calls_swapped", "{g} of {b} and {a}, times {k}.", "return {g}({b}, {a}) * {k}", _NN, helper="minus"),
    Shape("calls_lookup", "{g} of {a} and {b}, minus {k}.", "return {g}({a}, {b}) - {k}", ("table", "key"),
          helper="lookup"),
    Shape("calls_gap", "{g} of {a} and {b}, at least {k}.", "gap = {g}({a}, {b})\nreturn max(gap, {k})", _NN,
          helper="minus", heldout=True),
)  # fmt: skip

SHAPES: tuple[Shape, ...] = (
    *(_composition(row, column) for row in range(len(_AGGREGATES)) for column in range(len(_CONDITIONS))),
    *_SINGLES,
)
BY_NAME: Mapping[str, Shape] = {shape.name: shape for shape in SHAPES}


def _number(random: Random, near: list[int]) -> int:
    if near and random.random() < 0.7:
        return max(0, random.choice(near) + random.choice((-1, 0, 0, 1)))
    return random.randrange(1, 10)


def _argument(kind: str, random: Random, near: list[int]) -> Value:
    match kind:
        case "number":
            return _number(random, near)
        case "small":
            return random.randrange(0, 4)
        case "numbers":
            return [_number(random, near) for _ in range(random.choice((2, 3, 3, 4)))]
        case "text":
            return random.choice(TEXTS)
        case "letter":
            return random.choice("abc")
        case "texts":
            return [random.choice(TEXTS) for _ in range(random.choice((2, 3)))]
        case "table":
            return {key: _number(random, near) for key in random.sample(("a", "b", "c"), 2)}
        case _:
            return random.choice(("a", "b", "c"))


def write(shape: Shape, name: str, namer: Namer, *, helper: str = "") -> Function:
    """Write one function of the given structure.

    Args:
        shape: the structure.
        name: the function's name.
        namer: draws its parameters and constants.
        helper: name of the function `{g}` that it calls; needed iff the shape has one.
    """
    parameters = namer.parameters(3)
    constants = namer.constants(2)
    fields = dict(zip("abc", parameters, strict=True)) | dict(zip("km", map(str, constants), strict=True))
    fields |= {"f": name, "g": helper}
    used = parameters[: len(shape.arguments)]
    signature = ", ".join(used) + (f"={constants[0]}" if shape.defaults else "")
    lines = [f'    """{shape.document}"""', *_indented(shape.body)]
    text = f"def {name}({signature}):\n" + "\n".join(lines).format(**fields)
    inner = [c for c, key in zip(constants, "km", strict=True) if f"{{{key}}}" in shape.body + shape.document]
    small = any(constant < 10 for constant in inner)

    def sample(random: Random) -> tuple[Value, ...]:
        near = list(inner) if small or random.random() < 0.6 else []
        near += [random.randrange(2, 10)]
        values = tuple(_argument(kind, random, near) for kind in shape.arguments)
        return values[:-1] if shape.defaults and random.random() < 0.5 else values

    return Function(name=name, shape=shape, source=text, sample=sample)


def _indented(body: str) -> list[str]:
    return ["    " + line for line in body.splitlines()]
