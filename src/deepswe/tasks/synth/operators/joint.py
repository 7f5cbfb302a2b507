"""Bugs with several sites or across functions: what a careless refactoring leaves behind."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import libcst as cst

from deepswe.tasks.synth.operators.logic import flip_comparison
from deepswe.tasks.synth.operators.source import Edit, Edits, Function, Source, call_name, positional, simple
from deepswe.tasks.synth.operators.values import off_by_one, shift_slice, small_integer, swap_arithmetic

_MAX_PAIRS = 6


def shift_constant(source: Source, function: Function) -> Iterator[Edits]:
    """Every use of one number in a function is one larger: several sites, one wrong idea."""
    uses: dict[int, list[cst.CSTNode]] = defaultdict(list)
    for node in function.nodes:
        value = small_integer(node)
        if value is not None:
            uses[value].append(node)
    for value, nodes in uses.items():
        if len(nodes) >= 2:
            yield tuple(source.replace(node, str(value + 1)) for node in nodes)


def swap_targets(source: Source, function: Function) -> Iterator[Edits]:
    """Two assignments of a function exchange their names: two sites."""
    targets: list[cst.Name] = []
    for node in function.nodes:
        if isinstance(node, cst.Assign) and len(node.targets) == 1:
            target = node.targets[0].target
            if isinstance(target, cst.Name):
                targets.append(target)
    for first, second in itertools.pairwise(targets):
        if first.value != second.value:
            yield (source.replace(first, second.value), source.replace(second, first.value))


def swap_uses(source: Source, function: Function) -> Iterator[Edits]:
    """Two parameters are mixed up in the whole body: as many sites as they have uses."""
    parameters = [name for name in function.names if name in _plain_parameters(function)]
    for first, second in itertools.pairwise(parameters):
        uses = [
            (node, second if node.value == first else first)
            for node in _loads(function)
            if node.value in (first, second)
        ]
        if {name for _, name in uses} == {first, second}:
            yield tuple(source.replace(node, name) for node, name in uses)


def two_bugs(source: Source, function: Function) -> Iterator[Edits]:
    """Two small bugs in different statements of one function: a comparison or an operator, and a number or a bound."""
    first = [(edits, node) for node in function.nodes for edits in _first(node, source, function)]
    second = [(edits, node) for node in function.nodes for edits in _second(node, source, function)]
    made = 0
    for edits, node in first:
        for others, other in second:
            if abs(source.lines(node)[0] - source.lines(other)[0]) >= 2 and made < _MAX_PAIRS:
                made += 1
                yield (*edits, *others)
                break


def swap_callee(source: Source, function: Function) -> Iterator[Edits]:
    """A call goes to a sibling of the function that was meant, with the same number of parameters."""
    siblings = _siblings(source, function)
    for node in function.nodes:
        name = call_name(node)
        if isinstance(node, cst.Call) and name in siblings:
            own = isinstance(node.func, cst.Attribute)
            if own and not (isinstance(node.func, cst.Attribute) and source.text(node.func.value) in ("self", "cls")):
                continue
            others = [other for other in siblings if other != name and siblings[other] == siblings[name]]
            for other in others[:2]:
                target = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
                yield (source.replace(target, other),)


def partial_refactoring(source: Source, function: Function) -> Iterator[Edits]:
    """Two parameters change places in a definition and in all calls but one: sites in several functions."""
    parameters = function.node.params
    plain = [item for item in parameters.params if item.default is None and item.name.value not in ("self", "cls")]
    if len(plain) < 2 or parameters.posonly_params:
        return
    calls = [
        (user, node) for user in source.functions for node in user.nodes if _calls(source, node, function, len(plain))
    ]
    if len(calls) < 2 or not any(user is not function for user, _ in calls):
        return
    first, second = plain[0].name, plain[1].name
    definition = (source.replace(first, second.value), source.replace(second, first.value))
    for left_out in range(min(len(calls), 3)):
        swapped = [_swapped(source, call) for at, (_, call) in enumerate(calls) if at != left_out]
        yield (*definition, *(edit for pair in swapped for edit in pair))


def change_default(source: Source, function: Function) -> Iterator[Edits]:
    """A parameter's default is another one; callers that rely on it change their result."""
    parameters = function.node.params
    for parameter in (*parameters.params, *parameters.kwonly_params):
        default = parameter.default
        value = small_integer(default) if default is not None else None
        if value is not None and default is not None:
            yield (source.replace(default, str(value + 1)),)
        elif isinstance(default, cst.Name) and default.value in ("True", "False"):
            yield (source.replace(default, "False" if default.value == "True" else "True"),)


def two_functions(source: Source, function: Function) -> Iterator[Edits]:
    """A bug in a function and another one in a function of the file that it calls."""
    callees = _callees(source, function)
    own = [edits for node in function.nodes for edits in _first(node, source, function)]
    for callee in callees[:3]:
        theirs = [edits for node in callee.nodes for edits in _second(node, source, callee)]
        if own and theirs:
            yield (*own[0], *theirs[0])
            yield (*own[-1], *theirs[-1])


def _first(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    yield from flip_comparison(node, source, function)
    yield from swap_arithmetic(node, source, function)


def _second(node: cst.CSTNode, source: Source, function: Function) -> Iterator[Edits]:
    yield from off_by_one(node, source, function)
    yield from shift_slice(node, source, function)


def _plain_parameters(function: Function) -> set[str]:
    return {item.name.value for item in function.node.params.params}


def _loads(function: Function) -> Iterator[cst.Name]:
    """Uses of names in the body, keyword names and attributes apart."""
    taken: set[int] = set()
    for node in function.nodes:
        if isinstance(node, cst.AssignTarget | cst.For | cst.CompFor):
            taken.add(id(node.target))
        elif isinstance(node, cst.Arg) and node.keyword is not None:
            taken.add(id(node.keyword))
        elif isinstance(node, cst.Attribute):
            taken.add(id(node.attr))
    for node in function.nodes:
        if isinstance(node, cst.Name) and id(node) not in taken:
            yield node


def _siblings(source: Source, function: Function) -> dict[str, int]:
    """Functions beside a function, name -> number of parameters without defaults."""
    prefix = function.name.rpartition(".")[0]
    found: dict[str, int] = {}
    for other in source.functions:
        outer = other.name.rpartition(".")[0]
        if outer in (prefix, "") and not other.short_name.startswith("__") and other.short_name != function.short_name:
            found[other.short_name] = sum(item.default is None for item in other.node.params.params)
    return found


def _calls(source: Source, node: cst.CSTNode, function: Function, count: int) -> bool:
    """Whether a node calls that function with its parameters in their places."""
    if not isinstance(node, cst.Call) or call_name(node) != function.short_name or len(positional(node)) < 2:
        return False
    if len(positional(node)) > count or len(positional(node)) != len(node.args):
        return False
    if function.is_method:
        return isinstance(node.func, cst.Attribute) and source.text(node.func.value) in ("self", "cls")
    return isinstance(node.func, cst.Name) and "." not in function.name


def _swapped(source: Source, call: cst.CSTNode) -> Sequence[Edit]:
    arguments = positional(call) if isinstance(call, cst.Call) else []
    first, second = (argument.value for argument in arguments[:2])
    return (
        source.replace(first, source.text(second)),
        source.replace(second, source.text(first)),
    )


def _callees(source: Source, function: Function) -> list[Function]:
    prefix = function.name.rpartition(".")[0]
    names = {call_name(node) for node in function.nodes if isinstance(node, cst.Call)}
    return [
        other
        for other in source.functions
        if other.short_name in names and other is not function and other.name.rpartition(".")[0] in (prefix, "")
    ]


def drop_result(source: Source, function: Function) -> Iterator[Edits]:
    """A name that was just set to a changed value is not set: `a = f(a)` becomes `f(a)`."""
    for node in function.nodes:
        inner = simple(node)
        if isinstance(inner, cst.Assign) and len(inner.targets) == 1 and isinstance(inner.value, cst.Call):
            target = inner.targets[0].target
            arguments = [source.text(argument.value) for argument in inner.value.args]
            if isinstance(target, cst.Name) and target.value in arguments:
                yield (source.replace(inner, source.text(inner.value)),)
