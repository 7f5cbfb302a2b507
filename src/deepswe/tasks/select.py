"""Which tasks of a stored set a run uses, and in which split: by repository, never by task."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from deepswe.config import TaskSetTasks
from deepswe.errors import ConfigError, TaskError
from deepswe.tasks.benchmarks import is_evaluation_repository
from deepswe.tasks.task import Measured, Task, TaskSet

TRAIN = "train"


def select_tasks(tasks: TaskSet, config: TaskSetTasks) -> TaskSet:
    """The tasks that a recipe asks for, each with the split of its repository.

    Raises:
        ConfigError: nothing is left; the recipe names a repository that the set does not have; or a training task
            belongs to a benchmark and `tasks.allow_contaminated` is not set.
        TaskError: the set has one repository in training and elsewhere.
    """
    names = {task.repo for task in tasks.tasks}
    for name in (*config.repositories, *config.heldout):
        if name not in names:
            raise ConfigError(
                f"{config.path} has no task of the repository {name!r}; it has {', '.join(sorted(names))}"
            )
    splits = repository_splits(tasks, config)
    kept = [replace(task, split=splits[task.repo]) for task in tasks.tasks if _wanted(task, tasks, config)]
    if not kept:
        raise ConfigError(_nothing_left(tasks, config))
    chosen = tuple(kept[: config.limit] if config.limit else kept)
    _refuse_contaminated(chosen, config)
    return replace(tasks.only([task.id for task in chosen]), tasks=chosen)


def repository_splits(tasks: TaskSet, config: TaskSetTasks) -> Mapping[str, str]:
    """Repository -> split: held out by name, else by a hash of the name, else as the set says.

    Raises:
        TaskError: the set itself has a repository both in training and in another split.
    """
    found: dict[str, set[str]] = {}
    for task in tasks.tasks:
        found.setdefault(task.repo, set()).add(task.split)
    if config.heldout or config.heldout_share:
        count = round(config.heldout_share * len(found))
        order = sorted(found, key=lambda name: hashlib.sha256(f"{config.seed}\x1f{name}".encode()).digest())
        heldout = {*config.heldout, *order[:count]}
        return {name: "heldout" if name in heldout else TRAIN for name in found}
    for name, splits in found.items():
        if len(splits) > 1:
            raise TaskError(
                f"repository {name} is in the splits {', '.join(sorted(splits))}; a split is of whole repositories: "
                "set tasks.heldout or tasks.heldout_share"
            )
    return {name: splits.pop() for name, splits in found.items()}


def _wanted(task: Task, tasks: TaskSet, config: TaskSetTasks) -> bool:
    measured = tasks.measured.get(task.id, Measured())
    return (
        (measured.verdict == "sound" or (config.unvalidated and not measured.verdict))
        and (not config.repositories or task.repo in config.repositories)
        and (not config.difficulties or task.tags.get("difficulty", "") in config.difficulties)
        and (not config.max_runtime_s or (measured.runtime_s or 0.0) <= config.max_runtime_s)
    )


def _nothing_left(tasks: TaskSet, config: TaskSetTasks) -> str:
    unvalidated = sum(not tasks.measured.get(task.id, Measured()).verdict for task in tasks.tasks)
    if unvalidated == len(tasks.tasks) and unvalidated and not config.unvalidated:
        return (
            f"none of the {unvalidated} tasks of {config.path} was validated; run `deepswe tasks validate`, or set "
            "tasks.unvalidated = true"
        )
    return f"the filters of the section tasks leave none of the {len(tasks.tasks)} tasks of {config.path}"


def _refuse_contaminated(tasks: tuple[Task, ...], config: TaskSetTasks) -> None:
    if config.allow_contaminated:
        return
    bad = [task for task in tasks if task.split == TRAIN and (task.evaluation or is_evaluation_repository(task.repo))]
    if bad:
        raise ConfigError(
            f"{len(bad)} training tasks of {config.path} belong to evaluation benchmarks, such as {bad[0].id} of "
            f"{bad[0].repo}; take them out with `deepswe tasks decontaminate`, or set tasks.allow_contaminated = true, "
            "which the record of the run will say"
        )
