"""Bugs in calls and names: arguments, twins, conversions, another variable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from deepswe.tasks.synth.operators.source import Edit, Edits, Function, Source, call_name, positional

_TWINS: Mapping[str, str] = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "startswith": "endswith",
    "endswith": "startswith",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "strip": "rstrip",
    "upper": "lower",
    "lower": "upper",
    "find": "rfind",
    "rfind": "find",
    "ljust": "rjust",
    "rjust": "ljust",
    "append": "extend",
    "split": "rsplit",
    "rsplit": "split",
    "partition": "rpartition",
    "rpartition": "partition",
    "floor": "ceil",
    "ceil": "floor",
    "keys": "values",
    "values": "keys",
    "isdigit": "isalpha",
    "match": "search",
    "search": "match",
    "issubset": "issuperset",
    "union": "intersection",
    "intersection": "union",
}
_CLEANERS = frozenset({"strip", "lstrip", "rstrip", "lower", "upper", "copy", "splitlines", "title", "casefold"})
_CONVERTERS = frozenset({"list", "tuple", "sorted", "reversed", "set", "str", "int", "float", "abs", "iter", "dict"})
_PLAIN = (cst.Name, cst.Attribute, cst.Integer, cst.Float, cst.SimpleString, cst.Subscript)


def swap_arguments(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """The first two positional arguments of a call change places."""
    arguments = positional(node)[:2] if isinstance(node, cst.Call) else []
    if len(arguments) == 2:
        first, second = (argument.value for argument in arguments)
        if isinstance(first, _PLAIN) and isinstance(second, _PLAIN) and source.text(first) != source.text(second):
            yield (source.replace(first, source.text(second)), source.replace(second, source.text(first)))


def drop_argument(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """The last keyword argument of a call is forgotten."""
    if isinstance(node, cst.Call) and len(node.args) >= 2 and node.args[-1].keyword is not None:
        before, last = node.args[-2], node.args[-1]
        yield (Edit(source.end(before), source.end(last), ""),)


def swap_call(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """A call of a twin: `min` for `max`, `lstrip` for `rstrip`, `startswith` for `endswith`."""
    if isinstance(node, cst.Call) and call_name(node) in _TWINS:
        name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        yield (source.replace(name, _TWINS[call_name(node)]),)


def drop_call(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """`x.strip()` or `list(x)` becomes `x`."""
    if not isinstance(node, cst.Call):
        return
    if isinstance(node.func, cst.Attribute) and not node.args and node.func.attr.value in _CLEANERS:
        yield (source.replace(node, source.bracketed(node.func.value)),)
    elif isinstance(node.func, cst.Name) and node.func.value in _CONVERTERS and len(node.args) == 1:
        argument = node.args[0]
        if not argument.star and argument.keyword is None and isinstance(argument.value, cst.Name | cst.Attribute):
            yield (source.replace(node, source.text(argument.value)),)


def wrong_variable(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """Another local name is used in a return, an argument, an index or an operand."""
    for child in _operands(node):
        if isinstance(child, cst.Name) and child.value in function.names:
            place = function.names.index(child.value)
            for step in (1, -1):
                other = function.names[(place + step) % len(function.names)]
                if other != child.value:
                    yield (source.replace(child, other),)


def wrong_return(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    """A returned pair is reversed; a returned call of one name gives the name itself."""
    if not isinstance(node, cst.Return):
        return
    value = node.value
    if isinstance(value, cst.Tuple) and len(value.elements) == 2:
        first, second = (element.value for element in value.elements)
        if source.text(first) != source.text(second):
            yield (source.replace(first, source.text(second)), source.replace(second, source.text(first)))
    elif isinstance(value, cst.Call) and len(value.args) == 1:
        argument = value.args[0]
        if isinstance(argument.value, cst.Name) and not argument.star:
            yield (source.replace(value, source.text(argument.value)),)


def _operands(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    match node:
        case cst.Return(value=value) if value is not None:
            yield value
        case cst.Call():
            yield from (argument.value for argument in positional(node))
        case cst.Index(value=value):
            yield value
        case cst.BinaryOperation(left=left, right=right):
            yield left
            yield right
        case cst.Comparison(left=left, comparisons=[target]):
            yield left
            yield target.comparator
        case _:
            return
