"""Grow a data file of task recipes: search its repositories, keep each verdict as soon as it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deepswe.progress import Progress
from deepswe.tasks.bundled import Catalogue, RepositoryRecipe, TaskRecipe, build_source, load_catalogue, write_catalogue
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.find import Found, Plan, find_tasks
from deepswe.tasks.synth.journal import Journal

GROWTH = Plan(per_function=2, per_kind=2, min_failing=2, max_covering=25, confirm=True, files_seconds=0.5)
"""What the bundled set is made of: narrow bugs of many kinds, each with a failing test that no issue shows."""


def grow_catalogue(
    path: Path,
    cache: LayerCache,
    plan: Plan,
    names: Sequence[str],
    progress: Progress,
    *,
    journals: Path,
    pip: Pip | None = None,
) -> Mapping[str, Mapping[str, int]]:
    """Search repositories until each has `plan.target` tasks; the file is rewritten after each repository.

    Args:
        path: the data file. Its tasks stay as they are; new ones come after them.
        cache: for layers, tools and profiles.
        plan: for each repository.
        names: which repositories; empty takes all.
        progress: told of each task.
        journals: directory of one journal a repository, from which an interrupted search goes on.
        pip: how pip is called.

    Returns:
        Repository -> how many bugs met which end.

    Raises:
        BuildError: a repository or the measuring tools cannot be built.
        TaskError: a repository's tests cannot be run. What was found before is in the file.
    """
    verdicts: dict[str, Mapping[str, int]] = {}
    for name in names or load_catalogue(path).names:
        catalogue = load_catalogue(path)
        source = build_source(catalogue.repository(name), cache, pip or Pip(), catalogue.build_requirements)
        known = [task for task in catalogue.tasks if task.repo == name]
        journal = Journal(journals / f"{name}.jsonl", {"plan": repr(plan), "known": [task.id for task in known]})
        found = find_tasks(
            source, cache, plan, progress, known=known, journal=journal.read(), on_verdict=journal.add, pip=pip
        )
        verdicts[name] = found.verdicts
        write_catalogue(with_found(load_catalogue(path), name, found), path)
    return verdicts


def with_repository(catalogue: Catalogue, recipe: RepositoryRecipe) -> Catalogue:
    """The catalogue with one more repository, or with that one's recipe replaced."""
    others = tuple(row for row in catalogue.repositories if row.name != recipe.name)
    return catalogue.model_copy(update={"repositories": (*others, recipe)})


def with_found(catalogue: Catalogue, name: str, found: Found) -> Catalogue:
    """The catalogue with what a search of one repository found."""
    repositories = tuple(
        row.model_copy(update={"passing": {**row.passing, **found.passing}}) if row.name == name else row
        for row in catalogue.repositories
    )
    grouped: dict[str, list[TaskRecipe]] = {row.name: [] for row in repositories}
    for task in catalogue.tasks:
        grouped[task.repo].append(task)
    grouped[name] = list(found.tasks)
    tasks = tuple(task for rows in grouped.values() for task in rows)
    return catalogue.model_copy(update={"repositories": repositories, "tasks": tasks})
