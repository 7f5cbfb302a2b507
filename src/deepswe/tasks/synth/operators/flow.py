"""Bugs in the flow: guards, branches, statements and handlers that are forgotten, moved or changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import libcst as cst

from deepswe.tasks.synth.operators.source import Edit, Edits, Function, Source, simple, statements_of

_OTHER_ERROR: Mapping[str, str] = {
    "KeyError": "IndexError",
    "IndexError": "KeyError",
    "ValueError": "TypeError",
    "TypeError": "ValueError",
}
_LEAVING = (cst.Return, cst.Raise, cst.Continue, cst.Break)


def drop_guard(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """An `if` that only returns, raises or skips is forgotten."""
    for statement in statements_of(node):
        if isinstance(statement, cst.If) and statement.orelse is None:
            body = statements_of(statement.body)
            inner = simple(body[0]) if len(body) == 1 else None
            if isinstance(inner, _LEAVING):
                yield (source.without(statement, len(statements_of(node)) == 1),)


def drop_branch(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """The last `elif` or `else` of an `if` is forgotten."""
    if isinstance(node, cst.If) and node.orelse is not None:
        last = node.orelse
        if not isinstance(last, cst.If) or last.orelse is None:
            yield (Edit(source.end(node.body), source.end(last), ""),)


def drop_statement(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """One call for its effect, or one assignment to an attribute, an item or with an operator, is forgotten."""
    statements = statements_of(node)
    for statement in statements:
        inner = simple(statement)
        forgettable = isinstance(inner, cst.AugAssign) or (
            isinstance(inner, cst.Expr) and isinstance(inner.value, cst.Call)
        )
        if isinstance(inner, cst.Assign) and len(inner.targets) == 1:
            forgettable = isinstance(inner.targets[0].target, cst.Attribute | cst.Subscript)
        if forgettable:
            yield (source.without(statement, len(statements) == 1),)


def swap_statements(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """Two neighbouring statements of which the second uses what the first sets change places."""
    statements = statements_of(node)
    for first, second in itertools.pairwise(statements):
        one, two = simple(first), simple(second)
        acts = (cst.AugAssign, cst.Assign, cst.Expr)
        if isinstance(one, cst.AugAssign | cst.Assign) and isinstance(two, acts):
            target = one.target if isinstance(one, cst.AugAssign) else one.targets[0].target
            text = source.text(target)
            # A plain name is only known before its first assignment if it had an earlier value.
            earlier = (
                isinstance(one, cst.AugAssign) or text in _parameters(function) or not isinstance(target, cst.Name)
            )
            if earlier and text in source.text(two) and "\n" not in source.text(one) + source.text(two):
                yield (source.replace(one, source.text(two)), source.replace(two, source.text(one)))


def swap_jump(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`break` becomes `continue`, and the other way round."""
    if isinstance(node, cst.Break | cst.Continue):
        yield (source.replace(node, "continue" if isinstance(node, cst.Break) else "break"),)


def narrow_except(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """A handler of several exceptions keeps the first one; a handler of one catches another one."""
    if not isinstance(node, cst.ExceptHandler) or node.type is None:
        return
    if isinstance(node.type, cst.Tuple) and len(node.type.elements) > 1:
        yield (source.replace(node.type, source.text(node.type.elements[0].value)),)
    elif isinstance(node.type, cst.Name):
        yield (source.replace(node.type, _OTHER_ERROR.get(node.type.value, "LookupError")),)


def _parameters(function: Function) -> set[str]:
    parameters = function.node.params
    return {item.name.value for item in (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params)}
