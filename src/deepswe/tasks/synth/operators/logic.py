"""Bugs in conditions: comparisons, boolean operators, negations, ternaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from deepswe.tasks.synth.operators.source import Edits, Function, Source, children

_COMPARISONS: Mapping[type[cst.BaseCompOp], tuple[str, ...]] = {
    cst.LessThan: ("<=", ">"),
    cst.LessThanEqual: ("<",),
    cst.GreaterThan: (">=", "<"),
    cst.GreaterThanEqual: (">",),
    cst.Equal: ("!=",),
    cst.NotEqual: ("==",),
    cst.In: ("not in",),
    cst.NotIn: ("in",),
    cst.Is: ("is not",),
    cst.IsNot: ("is",),
}


def flip_comparison(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`a < b` becomes `a <= b` or `a > b`; `==` becomes `!=`; and so on."""
    if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        operator = node.comparisons[0].operator
        for other in _COMPARISONS.get(type(operator), ()):
            yield (source.replace(operator, other),)


def swap_boolean(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`a and b` becomes `a or b`, and the other way round."""
    if isinstance(node, cst.BooleanOperation):
        yield (source.replace(node.operator, "or" if isinstance(node.operator, cst.And) else "and"),)


def drop_term(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`a and b` becomes `a`, or `b`."""
    if isinstance(node, cst.BooleanOperation) and "\n" not in source.text(node):
        for kept in (node.left, node.right):
            yield (source.replace(node, source.bracketed(kept)),)


def negate_condition(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`if a:` becomes `if not a:`; a `not` that is there goes."""
    if not isinstance(node, cst.If | cst.While | cst.IfExp):
        return
    test = node.test
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        yield (source.replace(test, source.bracketed(test.expression)),)
    elif isinstance(test, cst.Name | cst.Call | cst.Attribute | cst.Subscript):
        if source.text(test) not in ("True", "False"):
            yield (source.replace(test, f"not {source.text(test)}"),)
    elif isinstance(test, cst.BooleanOperation) and "\n" not in source.text(test):
        yield (source.replace(test, f"not ({source.text(test)})"),)


def drop_not(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`not a` becomes `a`, outside of an `if`'s whole condition."""
    holders = (cst.BooleanOperation, cst.Arg, cst.Return, cst.Assign)
    if isinstance(node, holders):
        for child in children(node):
            if isinstance(child, cst.UnaryOperation) and isinstance(child.operator, cst.Not):
                yield (source.replace(child, source.bracketed(child.expression)),)


def swap_ternary(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`a if c else b` becomes `b if c else a`."""
    if isinstance(node, cst.IfExp) and source.text(node.body) != source.text(node.orelse):
        yield (
            source.replace(node.body, source.text(node.orelse)),
            source.replace(node.orelse, source.text(node.body)),
        )
