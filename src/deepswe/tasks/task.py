"""A task as data: the public part that an agent's side may see, and the hidden tests that only grading sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Runner = Literal["pytest", "unittest"]


@dataclass(frozen=True, slots=True)
class Repository:
    """The tree that the agent starts from, as a shared base and a small difference.

    Attributes:
        base: key of a read-only base layer in the layer cache, or None for an empty tree.
        environment: key of a read-only environment layer (a virtual environment seen at /opt/env), or None for the
            interpreter alone.
        files: path relative to the root -> text, written over the base.
        removed: paths of the base that the agent must not have.
        pythonpath: directories, relative to the root, from which the code is imported.
    """

    base: str | None = None
    environment: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class Task:
    """The public part of a task.

    Attributes:
        id: unique in its set.
        repo: name of the repository, for splits and reports.
        problem_statement: the issue text that the agent reads.
        repository: the tree.
        source: "micro", "bundled", ...
        split: "train", "heldout", "unseen", ...
        kind: what sort of bug it is.
        tags: anything else worth grouping by, such as difficulty.
    """

    id: str
    repo: str
    problem_statement: str
    repository: Repository
    source: str
    split: str
    kind: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """What grading knows and the agent's side never receives.

    Attributes:
        task_id: the task they belong to.
        files: path relative to the root -> text; written over the tree after the agent's patch.
        fail_to_pass, pass_to_pass: full test ids ("tests/test_a.py::TestB::test_c[param]").
        runner: how the tests are run.
        arguments: extra arguments for the runner.
        timeout_s: for the whole test run.
        gold_patch: a unified diff that solves the task.
    """

    task_id: str
    files: Mapping[str, str]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    runner: Runner = "pytest"
    arguments: tuple[str, ...] = ()
    timeout_s: float = 60.0
    gold_patch: str = ""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks and, kept apart, their hidden tests."""

    tasks: tuple[Task, ...]
    hidden: Mapping[str, HiddenTests]

    def split(self, name: str) -> tuple[Task, ...]:
        """The tasks of one split, in order."""
        return tuple(task for task in self.tasks if task.split == name)
