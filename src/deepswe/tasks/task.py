"""A task as data: the public part that an agent's side may see, and the hidden tests that only grading sees."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Runner = Literal["pytest", "unittest", "script"]
Verdict = Literal["", "sound", "flaky", "unsound"]


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
class Image:
    """A container image that brings the system, the interpreter and, unless the task has a base layer, the repository.

    The repository lies at /testbed. Only a container backend can run such a task.

    Attributes:
        name: as a registry knows it.
        setup: shell lines, run as root without network in every fresh sandbox of the task before anything else, for
            the agent and for grading alike. They must not need the hidden tests.
        patch: a unified diff that is applied after `setup`, for sources whose patch is the bug.
        hide: absolute paths that the agent's sandbox must not have. Removed there before the first commit, together
            with the image's own `.git`; grading keeps them.
        env: variables of every command, such as PATH.
    """

    name: str
    setup: str = ""
    patch: str = ""
    hide: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """The public part of a task.

    Attributes:
        id: unique in its set.
        repo: name of the repository, for splits and reports.
        problem_statement: the issue text that the agent reads.
        repository: the tree.
        source: "micro", "bundled", "r2e-gym", ...; `deepswe.tasks.sources` lists those that are imported.
        split: "train", "heldout", "unseen", ...
        kind: what sort of bug it is.
        tags: anything else worth grouping by. Names with a meaning: "difficulty" (a band, or the source's own word),
            "sites", "files", "failing_tests", "distance" (of a synthesised bug, numbers as text).
        image: where the task runs in a container, else None.
        base_commit: the commit of the upstream repository that the tree is, where it is known.
        license: of the repository, as SPDX writes it, where it is known.
        evaluation: it belongs to a benchmark; training refuses it unless `tasks.allow_contaminated` is set.
    """

    id: str
    repo: str
    problem_statement: str
    repository: Repository
    source: str
    split: str
    kind: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    image: Image | None = None
    base_commit: str = ""
    license: str = ""
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """What grading knows and the agent's side never receives.

    Attributes:
        task_id: the task they belong to.
        files: path relative to the root -> text; written over the tree after the agent's patch.
        fail_to_pass, pass_to_pass: full test ids ("tests/test_a.py::TestB::test_c[param]"), or whatever the source's
            parser calls its tests.
        runner: how the tests are run. "script" runs `script` in the task's image and reads its output with `parser`.
        arguments: extra arguments for the runner.
        timeout_s: for the whole test run.
        gold_patch: a unified diff that solves the task; "" where the source has none.
        expected: test id -> status that it must have; "passed" for every test that is not named here. R2E-Gym expects
            some tests to fail.
        quarantined: ids of flaky tests that validation took out of the two lists above; kept for the record.
        script: the shell script of runner "script".
        parser: a name in `deepswe.grading.parsers.PARSERS`.
        test_patch: a unified diff that brings the hidden tests, where the source gives no whole files.
        protected: patterns, as `git apply --exclude` takes them, of more paths that the agent's patch may not touch.
    """

    task_id: str
    files: Mapping[str, str]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    runner: Runner = "pytest"
    arguments: tuple[str, ...] = ()
    timeout_s: float = 60.0
    gold_patch: str = ""
    expected: Mapping[str, str] = field(default_factory=dict)
    quarantined: tuple[str, ...] = ()
    script: str = ""
    parser: str = ""
    test_patch: str = ""
    protected: tuple[str, ...] = ()

    @property
    def tests(self) -> tuple[str, ...]:
        """All graded ids, F2P first, each once."""
        return tuple(dict.fromkeys(self.fail_to_pass + self.pass_to_pass))


@dataclass(frozen=True, slots=True)
class Measured:
    """What validation and runs found out about a task. It is no part of what the task is, so not of the set's hash.

    Attributes:
        verdict: of validation; "" before it.
        reason: one sentence where the verdict is not "sound".
        runtime_s: seconds of one grading, None before it was measured.
        attempts, solved: counted over the runs that were rated.
    """

    verdict: Verdict = ""
    reason: str = ""
    runtime_s: float | None = None
    attempts: int = 0
    solved: int = 0

    @property
    def pass_rate(self) -> float | None:
        """Solved share of the attempts; None before the first."""
        return self.solved / self.attempts if self.attempts else None


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks in order and, kept apart, their hidden tests and what was measured.

    `deepswe.tasks.taskset` gives a set its hash and its card, and saves and loads it.

    Attributes:
        tasks: each with an id of its own.
        hidden: task id -> hidden tests, of every task.
        measured: task id -> measurements, of the tasks that have any.
    """

    tasks: tuple[Task, ...]
    hidden: Mapping[str, HiddenTests]
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def split(self, name: str) -> tuple[Task, ...]:
        """The tasks of one split, in order."""
        return tuple(task for task in self.tasks if task.split == name)

    def only(self, ids: Collection[str]) -> TaskSet:
        """The tasks with these ids, in the order of this set, with all that belongs to them."""
        wanted = frozenset(ids)
        tasks = tuple(task for task in self.tasks if task.id in wanted)
        kept = [task.id for task in tasks]
        measured = {name: self.measured[name] for name in kept if name in self.measured}
        return TaskSet(tasks, {name: self.hidden[name] for name in kept}, measured)
