"""All kinds of mutation, and what a file can suffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepswe.tasks.synth.mutation import Mutation, Site
from deepswe.tasks.synth.operators import calls, flow, joint, logic, values
from deepswe.tasks.synth.operators.source import Edits, Function, FunctionOperator, Operator, Source

NODE_KINDS: Mapping[str, Operator] = {
    "flip_comparison": logic.flip_comparison,
    "swap_arithmetic": values.swap_arithmetic,
    "swap_augmented": values.swap_augmented,
    "swap_boolean": logic.swap_boolean,
    "drop_term": logic.drop_term,
    "off_by_one": values.off_by_one,
    "flip_flag": values.flip_flag,
    "negate_condition": logic.negate_condition,
    "drop_not": logic.drop_not,
    "drop_guard": flow.drop_guard,
    "drop_branch": flow.drop_branch,
    "drop_statement": flow.drop_statement,
    "swap_statements": flow.swap_statements,
    "swap_arguments": calls.swap_arguments,
    "drop_argument": calls.drop_argument,
    "wrong_variable": calls.wrong_variable,
    "shift_slice": values.shift_slice,
    "shift_range": values.shift_range,
    "swap_jump": flow.swap_jump,
    "narrow_except": flow.narrow_except,
    "swap_call": calls.swap_call,
    "drop_call": calls.drop_call,
    "swap_ternary": logic.swap_ternary,
    "drop_minus": values.drop_minus,
    "wrong_return": calls.wrong_return,
}
"""One place each."""

FUNCTION_KINDS: Mapping[str, FunctionOperator] = {
    "drop_result": joint.drop_result,
    "shift_constant": joint.shift_constant,
    "swap_targets": joint.swap_targets,
    "swap_uses": joint.swap_uses,
    "two_bugs": joint.two_bugs,
    "swap_callee": joint.swap_callee,
    "change_default": joint.change_default,
    "partial_refactoring": joint.partial_refactoring,
    "two_functions": joint.two_functions,
}
"""Several places of a function, or several functions."""

KINDS = (*NODE_KINDS, *FUNCTION_KINDS)
MULTI_SITE_KINDS = ("shift_constant", "swap_targets", "swap_uses", "two_bugs", "partial_refactoring", "two_functions")
CROSS_FUNCTION_KINDS = ("swap_callee", "change_default", "partial_refactoring", "two_functions")


def mutations(file: str, text: str) -> tuple[Mutation, ...]:
    """Every mutation inside the functions of a file, in the order of the kinds and of the text.

    Annotations, decorators, assertions, docstrings and f-strings are left alone. A few of the mutations may not
    compile or may change nothing; `deepswe.tasks.synth.mutation.is_sound` tells.

    Raises:
        TaskError: the text is no Python.
    """
    source = Source(file, text)
    found: dict[frozenset[tuple[int, int, str]], Mutation] = {}
    for kind, edits, lines, function in _proposals(source):
        key = frozenset((edit.start, edit.end, edit.replacement) for edit in edits)
        if key not in found:
            found[key] = Mutation(kind, _sites(source, kind, edits, lines, function))
    return tuple(found.values())


def _proposals(source: Source) -> Iterator[tuple[str, Edits, tuple[int, int] | None, Function]]:
    for kind, operator in NODE_KINDS.items():
        for function in source.functions:
            for node in function.nodes:
                for edits in operator(node, source, function):
                    # The node may be a whole block of which one statement goes: then the edit itself says where.
                    lines = None if kind in _OF_BLOCKS else source.lines(node)
                    yield kind, edits, lines, function
    for kind, whole in FUNCTION_KINDS.items():
        for function in source.functions:
            # A default is evaluated with the definition; the tests that matter are those that run the body.
            lines = source.lines(function.node.body) if kind == "change_default" else None
            for edits in whole(source, function):
                yield kind, edits, lines, function


_OF_BLOCKS = frozenset({"drop_guard", "drop_statement", "swap_statements", "negate_condition", "drop_branch"})


def _sites(
    source: Source, kind: str, edits: Edits, lines: tuple[int, int] | None, function: Function
) -> tuple[Site, ...]:
    sites = []
    for edit in sorted(edits, key=lambda item: item.start):
        begin = source.line(edit.start)
        first, last = lines or (begin, source.line(max(edit.start, edit.end - 1)))
        owner = source.holder(edit) if kind in CROSS_FUNCTION_KINDS else function
        sites.append(Site(source.file, edit.start, edit.end, edit.replacement, owner.name, first, last))
    return tuple(sites)
