"""Assemble micro tasks: one to three small modules, one bug, an issue text and hidden tests.

Splits, and what differs between them:

- "train": names, constants and structures open to training (see `naming` and `shapes`); bugs of `TRAINING_KINDS`.
- "heldout": every function's name, constant and structure is one that no training task uses, in the function with the
  bug and in those around it; the structures are compositions of parts that training sees in other compositions; bugs
  of `TRAINING_KINDS`.
- "unseen": names and constants as in "heldout", structures as in "train"; bugs of `UNSEEN_KINDS` only, which no
  training task has, each kind in turn.

Truth of a task, by construction and by running both versions here: at least two hidden cases fail with the bug and
pass without it, of which the issue shows one; at least one passes with and without it; and each other single edit of
the line with the bug either fails a hidden case or agrees with the right line on every case that was drawn.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from deepswe.errors import TaskError
from deepswe.tasks.synth.micro.edits import TRAINING_KINDS, UNSEEN_KINDS, Edit, apply, draw_kind, edits
from deepswe.tasks.synth.micro.naming import Namer
from deepswe.tasks.synth.micro.shapes import BY_NAME, SHAPES, Function, Shape, Value, write
from deepswe.tasks.synth.micro.templates import Module
from deepswe.tasks.task import HiddenTests, Repository, Task

if TYPE_CHECKING:  # a process that makes tasks starts in half the time without it
    from deepswe.config import MicroTasks

DRAWN_CASES = 16
MOST_FAILING = 4
MOST_PASSING = 2
SINGLE_SHARE = 0.1
"""Share of training functions that are no composition; held-out ones all are."""
UNSEEN_SINGLE_SHARE = 0.8
"""The same for the split "unseen", whose kinds of bug mostly need one."""
FILE_NAMED = 0.95
"""Share of issues that name the file; the others only name the function."""
_TRIES = 1000

Arguments = tuple[Value, ...]


class _Shapes(NamedTuple):
    """What a split may be made of."""

    composed: tuple[Shape, ...]
    single: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class _Case:
    """One call, as a text and in parts, and what it gives: a `repr`, or "raises Name"."""

    call: str
    function: str
    arguments: Arguments
    right: str


@dataclass(frozen=True, slots=True)
class _Bug:
    """A bug that the hidden cases see."""

    edit: Edit
    failing: tuple[_Case, ...]
    passing: tuple[_Case, ...]
    got: str


def named_micro_task(config: MicroTasks, task_id: str) -> tuple[Task, HiddenTests]:
    """One task of the configured set by its id, without the others.

    Raises:
        TaskError: the set has none of that id.
    """
    counts = count_by_split(config)
    found = re.fullmatch(r"micro-([a-z]+)-(\d{5,})", task_id, re.ASCII)
    if found and int(found[2]) < counts.get(found[1], 0) and task_id == _id(found[1], int(found[2])):
        return micro_task(found[1], int(found[2]), seed=config.seed)
    known = ", ".join(f"{_id(split, 0)} to {_id(split, count - 1)}" for split, count in counts.items() if count)
    raise TaskError(f"there is no task {task_id!r} in the set; there are {known}")


def count_by_split(config: MicroTasks) -> dict[str, int]:
    """Tasks of each split."""
    return {"train": config.train, "heldout": config.heldout, "unseen": config.unseen}


def _id(split: str, number: int) -> str:
    return f"micro-{split}-{number:05d}"


def micro_task(split: str, number: int, *, seed: int) -> tuple[Task, HiddenTests]:
    """One task, a function of its three arguments.

    Raises:
        TaskError: the split is unknown.
    """
    if split not in {"train", "heldout", "unseen"}:
        raise TaskError(f"micro tasks have no split {split!r}; use train, heldout or unseen")
    random = Random(f"micro {seed} {split} {number}")
    for _ in range(_TRIES):
        drawn = _draw(split, number, random)
        if drawn is not None:
            return drawn
    raise TaskError(f"no micro task {split} {number} for seed {seed} within {_TRIES} tries; change tasks.seed")


def _draw(split: str, number: int, random: Random) -> tuple[Task, HiddenTests] | None:
    namer = Namer(random, heldout=split != "train")
    shapes = _shapes(split)
    share = UNSEEN_SINGLE_SHARE if split == "unseen" else SINGLE_SHARE
    functions = _module(random, namer, shapes, count=1, single_share=share)
    target = functions[-1]
    right = Module.read(_text(functions))
    kinds = {sorted(UNSEEN_KINDS)[number % len(UNSEEN_KINDS)]} if split == "unseen" else TRAINING_KINDS
    bug = _find_bug(right, functions, target, random, kinds)
    if bug is None:
        return None
    path = f"{namer.module()}.py"
    broken = apply(right, bug.edit)
    files = {path: broken.source}
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        files[f"{namer.module()}.py"] = _text(
            _module(random, namer, shapes, count=random.choice((1, 2)), single_share=share)
        )
    if random.random() < 0.5:
        files[f"test_{path}"] = _tests(path, bug.passing[:1])
    if random.random() < 0.3:
        files["README.md"] = f"Small functions: {', '.join(sorted(name for name in files if 'test_' not in name))}.\n"
    task = Task(
        id=_id(split, number),
        repo=f"micro/{path.removesuffix('.py')}",
        problem_statement=_issue(bug, path, random),
        repository=Repository(files=dict(sorted(files.items()))),
        source="micro",
        split=split,
        kind=bug.edit.kind,
        tags={"structure": target.shape.name},
    )
    return task, _hidden(task.id, path, bug, broken.source, right.source)


@cache
def _shapes(split: str) -> _Shapes:
    composed = tuple(shape for shape in SHAPES if "-" in shape.name)
    single = tuple(shape for shape in SHAPES if "-" not in shape.name)
    if split == "unseen":
        return _Shapes(composed, single)
    if split == "heldout":
        return _Shapes(tuple(shape for shape in composed if shape.heldout), ())
    return _Shapes(*(tuple(shape for shape in shapes if not shape.heldout) for shapes in (composed, single)))


def _module(random: Random, namer: Namer, shapes: _Shapes, *, count: int, single_share: float) -> list[Function]:
    """Functions of one module, helpers before their callers. A helper counts as one of them."""
    functions: list[Function] = []
    while len(functions) < count:
        shape = random.choice(shapes.single if shapes.single and random.random() < single_share else shapes.composed)
        helper = ""
        if shape.helper:
            helper = namer.function()
            functions.append(write(BY_NAME[shape.helper], helper, namer))
        functions.append(write(shape, namer.function(), namer, helper=helper))
    return functions


def _text(functions: Sequence[Function]) -> str:
    return "\n\n\n".join(function.source for function in functions) + "\n"


def _find_bug(
    right: Module, functions: Sequence[Function], target: Function, random: Random, kinds: Set[str]
) -> _Bug | None:
    possible = [edit for edit in edits(right, target.name) if edit.kind in kinds]
    if not possible:
        return None
    found = sorted({edit.kind for edit in possible})
    kind = draw_kind(found, random)
    edit = random.choice([edit for edit in possible if edit.kind == kind])
    broken = apply(right, edit)
    if broken.source.count(edit.text.strip()) != 1:
        return None
    cases, wrong = _cases(target, right, random), broken.load(target.name)
    failing = [case for case in cases if _outcome(wrong, case.arguments) != case.right]
    if len(failing) < 2:
        return None
    shown = min(failing, key=lambda case: (len(case.call), case.call))
    others = [case for case in failing if case is not shown]
    failing_calls = {case.call for case in failing}
    agreeing = [case for case in cases if case.call not in failing_calls]
    kept = [shown, *others[: MOST_FAILING - 1], *agreeing[:MOST_PASSING]]
    kept += _against_near_misses(right, broken, edit.line, target.name, kept, cases)
    passing = [case for case in kept if case.call not in failing_calls]
    for function in functions:
        if function is not target:
            others, same = _cases(function, right, random), broken.load(function.name)
            passing += [case for case in others if _outcome(same, case.arguments) == case.right][:MOST_PASSING]
    if not passing:
        return None
    seen = tuple(case for case in kept if case.call in failing_calls)
    return _Bug(edit, seen, tuple(passing), _outcome(wrong, shown.arguments))


def _cases(function: Function, module: Module, random: Random) -> list[_Case]:
    """Distinct calls that the right version answers without an exception."""
    cases: dict[str, _Case] = {}
    loaded = module.load(function.name)
    for _ in range(DRAWN_CASES):
        arguments = function.sample(random)
        right = _outcome(loaded, arguments)
        if not right.startswith("raises "):
            call = f"{function.name}({', '.join(map(repr, arguments))})"
            cases[call] = _Case(call, function.name, arguments, right)
    return list(cases.values())


def _against_near_misses(
    right: Module, broken: Module, line: int, function: str, kept: Sequence[_Case], cases: Sequence[_Case]
) -> list[_Case]:
    """Cases that reject the other edits of the same line which all kept cases would let pass."""
    added: list[_Case] = []
    for edit in edits(broken, function, line):
        if edit.text == right.lines[line]:
            continue
        candidate = apply(broken, edit).load(function)
        if all(_outcome(candidate, case.arguments) == case.right for case in (*kept, *added)):
            differing = (case for case in cases if _outcome(candidate, case.arguments) != case.right)
            added += itertools.islice(differing, 1)
    return added


def _outcome(function: Callable[..., object], arguments: Arguments) -> str:
    own = [argument.copy() if isinstance(argument, list | dict) else argument for argument in arguments]
    try:
        return repr(function(*own))
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, NameError, ZeroDivisionError) as error:
        return f"raises {type(error).__name__}"


def _issue(bug: _Bug, path: str, random: Random) -> str:
    """A short report of the first failing case; most name the file, the others only the function."""
    shown = bug.failing[0]
    call, right = f"`{shown.call}`", f"`{shown.right}`"
    got = bug.got if bug.got.startswith("raises ") else f"returns `{bug.got}`"
    if random.random() >= FILE_NAMED:
        return random.choice(
            (
                f"{call} {got}, but should return {right}.",
                f"Wrong result of `{shown.function}`:\n{call} {got}, expected {right}.",
            )
        )
    return random.choice(
        (
            f"In `{path}`, {call} {got}, but should return {right}.",
            f"`{path}`: {call} {got}, expected {right}.",
            f"{call} {got} instead of {right}, see `{path}`.",
            f"Wrong result in `{path}`:\n{call} {got}, expected {right}.",
        )
    )


def _tests(path: str, cases: Sequence[_Case]) -> str:
    """A unittest module, one method a case."""
    module = path.removesuffix(".py")
    names = ", ".join(dict.fromkeys(case.function for case in cases))
    lines = [
        "import unittest",
        "",
        f"from {module} import {names}",
        "",
        "",
        f"class {_class(path)}(unittest.TestCase):",
    ]
    for number, case in enumerate(cases):
        lines += [f"    def test_{number}(self):", f"        self.assertEqual({case.call}, {case.right})", ""]
    return "\n".join(lines)


def _class(path: str) -> str:
    return "".join(part.capitalize() for part in path.removesuffix(".py").split("_")) + "Test"


def _hidden(task_id: str, path: str, bug: _Bug, broken: str, source: str) -> HiddenTests:
    file = f"tests/test_{path}"
    ids = [f"{file}::{_class(path)}::test_{n}" for n in range(len(bug.failing) + len(bug.passing))]
    diff = difflib.unified_diff(
        broken.splitlines(keepends=True), source.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return HiddenTests(
        task_id=task_id,
        files={file: _tests(path, (*bug.failing, *bug.passing))},
        fail_to_pass=tuple(ids[: len(bug.failing)]),
        pass_to_pass=tuple(ids[len(bug.failing) :]),
        runner="unittest",
        timeout_s=20.0,
        gold_patch="".join(diff),
    )
