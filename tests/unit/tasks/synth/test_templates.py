"""A module does by its template what it does by its own text, and has its lines where its text has them."""

import ast
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from deepswe.tasks.synth.micro.edits import apply, edits
from deepswe.tasks.synth.micro.naming import Namer
from deepswe.tasks.synth.micro.shapes import BY_NAME, SHAPES, Function, Shape, write
from deepswe.tasks.synth.micro.templates import Module


def module_of(shape: Shape, random: Random) -> tuple[Module, Function]:
    namer = Namer(random, heldout=False)
    helper = namer.function() if shape.helper else ""
    above = [write(BY_NAME[shape.helper], helper, namer)] if helper else []
    function = write(shape, namer.function(), namer, helper=helper)
    return Module.read("\n\n\n".join(one.source for one in [*above, function]) + "\n"), function


def by_its_text(module: Module, function: str) -> Callable[..., object]:
    namespace: dict[str, Any] = {}
    exec(module.source, namespace)
    loaded: Callable[..., object] = namespace[function]
    return loaded


def outcome(function: Callable[..., object], arguments: tuple[object, ...]) -> str:
    try:
        return repr(function(*arguments))
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_module_and_each_of_its_bugs_do_what_their_texts_do(shape: Shape) -> None:
    random = Random(shape.name)
    right, function = module_of(shape, random)
    for module in (right, *(apply(right, edit) for edit in edits(right, function.name))):
        ours, theirs = module.load(function.name), by_its_text(module, function.name)
        for _ in range(3):
            arguments = function.sample(random)
            assert outcome(ours, arguments) == outcome(theirs, arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_an_outline_says_where_the_functions_are(shape: Shape) -> None:
    module, function = module_of(shape, Random(1))
    nodes = [node for node in ast.parse(module.source).body if isinstance(node, ast.FunctionDef)]
    assert [(of.name, of.first, of.body, of.end) for of in module.outlines()] == [
        (node.name, node.lineno - 1, node.body[1].lineno - 1, node.end_lineno) for node in nodes
    ]
    assert module.outlines()[-1].name == function.name
    assert module.outlines()[-1].names[: len(nodes[-1].args.args)] == tuple(a.arg for a in nodes[-1].args.args)


def test_modules_that_differ_in_names_and_numbers_alone_have_one_template() -> None:
    one, other = (module_of(BY_NAME["count-over"], Random(seed))[0] for seed in (1, 2))
    assert one.source != other.source
    assert one.template == other.template


def test_a_changed_line_changes_nothing_else() -> None:
    module, function = module_of(BY_NAME["count-over"], Random(1))
    edit = edits(module, function.name)[0]
    changed = apply(module, edit)
    assert changed.lines == (*module.lines[: edit.line], edit.text, *module.lines[edit.line + 1 :])
    assert changed.source == "\n".join(changed.lines)
