"""Bugs in values: numbers, arithmetic, flags, bounds of slices and ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from deepswe.tasks.synth.operators.source import Edits, Function, Source, call_name, is_text, positional

_ARITHMETIC: Mapping[type[cst.CSTNode], str] = {
    cst.Add: "-",
    cst.Subtract: "+",
    cst.Multiply: "+",
    cst.Divide: "//",
    cst.FloorDivide: "/",
    cst.Modulo: "//",
    cst.Power: "*",
    cst.BitAnd: "|",
    cst.BitOr: "&",
    cst.LeftShift: ">>",
    cst.RightShift: "<<",
}
_LARGEST = 1000


def swap_arithmetic(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`a + b` becomes `a - b`; and so on. Formatting and joining of literal texts are left alone."""
    if isinstance(node, cst.BinaryOperation) and not (is_text(node.left) or is_text(node.right)):
        other = _ARITHMETIC.get(type(node.operator))
        if other is not None:
            yield (source.replace(node.operator, other),)


def swap_augmented(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`a += b` becomes `a -= b`, or a plain assignment."""
    if isinstance(node, cst.AugAssign) and not is_text(node.value):
        if isinstance(node.operator, cst.AddAssign | cst.SubtractAssign):
            yield (source.replace(node.operator, "-=" if isinstance(node.operator, cst.AddAssign) else "+="),)
        yield (source.replace(node.operator, "="),)


def off_by_one(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """A small integer grows or shrinks by one."""
    value = small_integer(node)
    if value is not None:
        yield (source.replace(node, str(value + 1)),)
        if value > 0:
            yield (source.replace(node, str(value - 1)),)


def flip_flag(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`True` becomes `False`, and the other way round."""
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        yield (source.replace(node, "False" if node.value == "True" else "True"),)


def drop_minus(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`-a` becomes `a`."""
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        yield (source.replace(node, source.bracketed(node.expression)),)


def shift_slice(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """One end of a slice moves by one."""
    if not isinstance(node, cst.Slice):
        return
    for bound in (node.lower, node.upper):
        if isinstance(bound, cst.Name | cst.Attribute | cst.Call):
            yield (source.replace(bound, f"{source.text(bound)} + 1"),)
            yield (source.replace(bound, f"{source.text(bound)} - 1"),)


def shift_range(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """The end of a `range` moves by one."""
    if not isinstance(node, cst.Call) or call_name(node) != "range" or not isinstance(node.func, cst.Name):
        return
    arguments = positional(node)
    if arguments:
        bound = arguments[0 if len(arguments) == 1 else 1].value
        if not isinstance(bound, cst.Integer) and "\n" not in source.text(bound):
            yield (source.replace(bound, f"{source.text(bound)} - 1"),)
            yield (source.replace(bound, f"{source.text(bound)} + 1"),)


def small_integer(node: cst.CSTNode) -> int | None:
    """The value of a plain decimal integer below a thousand."""
    if isinstance(node, cst.Integer) and node.value.isdecimal() and str(int(node.value)) == node.value:
        return int(node.value) if int(node.value) < _LARGEST else None
    return None
