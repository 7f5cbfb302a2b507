"""`deepswe tasks synth`, as a function: from a project to a file with a task set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepswe.errors import StoreError, TaskError
from deepswe.jsonl import sole_writer
from deepswe.progress import Progress
from deepswe.tasks.bundled import RepositorySource, make_hidden_tests, make_task
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.find import Found, IssueWriter, Plan, find_tasks
from deepswe.tasks.synth.journal import Journal
from deepswe.tasks.synth.project import open_project
from deepswe.tasks.task import TaskSet
from deepswe.tasks.taskset import file_format, save_task_set

SOURCE = "mutation"
"""What tasks of this kind say of their source."""


@dataclass(frozen=True, slots=True)
class Synthesis:
    """What came of a project.

    Attributes:
        project, version: of the repository.
        tasks: how many there are.
        verdicts: bugs tried, by what became of them.
        covered: bugs that could be tried.
        hash: of the task set.
    """

    project: str
    version: str
    tasks: int
    verdicts: Mapping[str, int]
    covered: int
    hash: str


def synthesise(
    spec: str,
    plan: Plan,
    out: Path,
    cache: LayerCache,
    progress: Progress,
    *,
    writer: IssueWriter | None = None,
    pip: Pip | None = None,
    resume: bool = False,
) -> Synthesis:
    """Make tasks from a project by mutation, and write them to a file. Verdicts are kept at once in a journal beside
    the file, from which an interrupted call goes on; it is removed with the end.

    Args:
        spec: see `deepswe.tasks.synth.project.open_project`.
        plan: how many tasks of which sort.
        out: a task-set file; see `deepswe.tasks.taskset`.
        cache: for layers.
        progress: told of each step and task.
        writer: rewrites the issues.
        pip: how pip is called.
        resume: go on with an interrupted call of the same arguments.

    Raises:
        ProjectRefused: the project cannot be used, with a reason.
        TaskError: no bug became a task.
        StoreError: the file or its journal cannot be written, or there is a journal and `resume` is off.
    """
    file_format(out)
    place = out.with_name(f".{out.name}.journal")
    with sole_writer(place):
        if place.exists() and not resume:
            raise StoreError(f"{place} is of an interrupted search; go on with --resume, or remove it to start anew")
        source = open_project(spec, cache, pip or Pip(), progress)
        recipe = source.recipe
        search = {
            "project": [recipe.name, recipe.version, recipe.sha256],
            "plan": repr(plan),
            "rewritten": bool(writer),
        }
        journal = Journal(place, search)
        found = find_tasks(
            source,
            cache,
            plan,
            progress,
            journal=journal.read(),
            on_verdict=journal.add,
            writer=writer,
            pip=pip,
        )
        if not found.tasks:
            raise TaskError(f"no bug in {recipe.name} became a task; verdicts: {dict(found.verdicts)}")
        digest = save_task_set(task_set_of(found, source), out)
        journal.path.unlink(missing_ok=True)
        return Synthesis(recipe.name, recipe.version, len(found.tasks), dict(found.verdicts), found.covered, digest)


def task_set_of(found: Found, source: RepositorySource) -> TaskSet:
    """The tasks that a search found, with their hidden tests."""
    recipe = source.recipe.model_copy(update={"passing": dict(found.passing)})
    whole = RepositorySource(recipe, source.base, source.tests)
    tasks = tuple(make_task(row, whole, SOURCE) for row in found.tasks)
    return TaskSet(tasks, {row.id: make_hidden_tests(row, whole) for row in found.tasks})
