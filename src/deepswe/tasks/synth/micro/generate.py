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
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random
from types import CodeType
from typing import Any

from deepswe.config import MicroTasks
from deepswe.errors import TaskError
from deepswe.progress import Progress, Silent
from deepswe.tasks.synth.micro.edits import TRAINING_KINDS, UNSEEN_KINDS, Edit, apply, draw_kind, edits
from deepswe.tasks.synth.micro.naming import Namer
from deepswe.tasks.synth.micro.shapes import BY_NAME, SHAPES, Function, Shape, Value, write
from deepswe.tasks.task import HiddenTests, Repository, Task, TaskSet

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


@dataclass(frozen=True, slots=True)
class _Case:
    """One call and what it gives: a `repr`, or "raises Name"."""

    function: str
    arguments: Arguments
    right: str

    @property
    def call(self) -> str:
        return f"{self.function}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class _Bug:
    """A bug that the hidden cases see."""

    edit: Edit
    failing: tuple[_Case, ...]
    passing: tuple[_Case, ...]
    got: str


def micro_task_set(config: MicroTasks, progress: Progress | None = None) -> TaskSet:
    """All splits of the configured set. The same config gives the same set; a larger split extends a smaller one."""
    told = progress or Silent()
    tasks: list[Task] = []
    hidden: dict[str, HiddenTests] = {}
    counts = count_by_split(config)
    told.begin("Micro tasks", sum(counts.values()))
    for split, count in counts.items():
        for number in range(count):
            task, tests = micro_task(split, number, seed=config.seed)
            tasks.append(task)
            hidden[task.id] = tests
            told.advance()
    return TaskSet(tasks=tuple(tasks), hidden=hidden)


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
    source = _text(functions)
    kinds = {sorted(UNSEEN_KINDS)[number % len(UNSEEN_KINDS)]} if split == "unseen" else TRAINING_KINDS
    bug = _find_bug(source, functions, target, random, kinds)
    if bug is None:
        return None
    path = f"{namer.module()}.py"
    broken = apply(source, bug.edit)
    files = {path: broken}
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
    return task, _hidden(task.id, path, bug, broken, source)


def _shapes(split: str) -> list[Shape]:
    if split == "unseen":
        return list(SHAPES)
    if split == "heldout":
        return [shape for shape in SHAPES if shape.heldout and "-" in shape.name]
    return [shape for shape in SHAPES if not shape.heldout]


def _module(random: Random, namer: Namer, shapes: list[Shape], *, count: int, single_share: float) -> list[Function]:
    """Functions of one module, helpers before their callers. A helper counts as one of them."""
    compositions = [shape for shape in shapes if "-" in shape.name]
    singles = [shape for shape in shapes if "-" not in shape.name]
    functions: list[Function] = []
    while len(functions) < count:
        shape = random.choice(singles if singles and random.random() < single_share else compositions)
        helper = ""
        if shape.helper:
            helper = namer.function()
            functions.append(write(BY_NAME[shape.helper], helper, namer))
        functions.append(write(shape, namer.function(), namer, helper=helper))
    return functions


def _text(functions: Sequence[Function]) -> str:
    return "\n\n\n".join(function.source for function in functions) + "\n"


def _find_bug(
    source: str, functions: Sequence[Function], target: Function, random: Random, kinds: Set[str]
) -> _Bug | None:
    possible = [edit for edit in edits(source, target.name) if edit.kind in kinds]
    if not possible:
        return None
    found = sorted({edit.kind for edit in possible})
    kind = draw_kind(found, random)
    edit = random.choice([edit for edit in possible if edit.kind == kind])
    broken = apply(source, edit)
    if broken.count(edit.text.strip()) != 1:
        return None
    right, wrong = _load(source), _load(broken)
    cases = _cases(target, right, random)
    failing = [case for case in cases if _outcome(wrong, case) != case.right]
    if len(failing) < 2:
        return None
    shown = min(failing, key=lambda case: (len(case.call), case.call))
    others = [case for case in failing if case is not shown]
    agreeing = [case for case in cases if case not in failing]
    kept = [shown, *others[: MOST_FAILING - 1], *agreeing[:MOST_PASSING]]
    kept += _against_near_misses(broken, edit.line, target.name, kept, cases)
    passing = [case for case in kept if case in agreeing]
    for function in functions:
        if function is not target:
            passing += [c for c in _cases(function, right, random) if _outcome(wrong, c) == c.right][:MOST_PASSING]
    if not passing:
        return None
    return _Bug(edit, tuple(case for case in kept if case in failing), tuple(passing), _outcome(wrong, shown))


def _cases(function: Function, namespace: Mapping[str, Any], random: Random) -> list[_Case]:
    """Distinct calls that the right version answers without an exception."""
    cases: dict[str, _Case] = {}
    for _ in range(DRAWN_CASES):
        case = _Case(function.name, function.sample(random), "")
        right = _outcome(namespace, case)
        if not right.startswith("raises "):
            cases[case.call] = _Case(case.function, case.arguments, right)
    return list(cases.values())


def _against_near_misses(
    broken: str, line: int, function: str, kept: Sequence[_Case], cases: Sequence[_Case]
) -> list[_Case]:
    """Cases that reject the other edits of the same line which all kept cases would let pass."""
    added: list[_Case] = []
    for edit in edits(broken, function):
        if edit.line != line:
            continue
        candidate = _load(apply(broken, edit))
        if all(_outcome(candidate, case) == case.right for case in (*kept, *added)):
            added += [case for case in cases if _outcome(candidate, case) != case.right][:1]
    return added


def _load(source: str) -> dict[str, Any]:
    """Run a generated module; its text is ours, so it runs in process."""
    code: CodeType = compile(source, "<micro>", "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace


def _outcome(namespace: Mapping[str, Any], case: _Case) -> str:
    function: Callable[..., object] = namespace[case.function]
    arguments = [argument.copy() if isinstance(argument, list | dict) else argument for argument in case.arguments]
    try:
        return repr(function(*arguments))
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
