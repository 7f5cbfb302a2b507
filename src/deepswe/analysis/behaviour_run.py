"""The behaviour in a recorded run: read once, trajectory by trajectory, and put together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepswe.analysis.behaviour_profile import Profile, compare_solved, drift, profile, summarise
from deepswe.analysis.record import RunRecord, read_run
from deepswe.config import BundledTasks, MicroTasks, Recipe, TaskSetTasks
from deepswe.envs.suites import build_tasks
from deepswe.errors import RunError
from deepswe.progress import Progress, Silent
from deepswe.rollout.store import TrajectoryStore
from deepswe.tasks.layers import LayerCache, default_cache_root
from deepswe.tasks.task import TaskSet
from deepswe.tasks.taskset import load_task_set
from deepswe.types import Trajectory

IMITATION = "imitation"
"""The phase of the reference solver's trajectories, which are no behaviour of the model."""


def tasks_of_run(run: RunRecord, source: str = "auto", *, progress: Progress | None = None) -> TaskSet | None:
    """The tasks of a run with their gold patches; None where they are not known.

    Args:
        source: "auto" takes the recipe's where that is cheap (a file that is there), "recipe" also generates or builds
            them, "none" takes none; anything else is the path of a task set.

    Raises:
        DeepsweError: the tasks were asked for and cannot be had.
    """
    if source == "none":
        return None
    if source not in ("auto", "recipe"):
        return load_task_set(Path(source))
    try:
        tasks = Recipe.model_validate(run.recipe).tasks
    except ValidationError as error:
        if source == "auto":
            return None
        raise RunError(f"{run.directory} has no recipe that this version reads: {error}; give the task set") from error
    if isinstance(tasks, TaskSetTasks) and not tasks.path.exists() and source == "auto":
        return None
    if isinstance(tasks, TaskSetTasks) or (source == "recipe" and isinstance(tasks, MicroTasks | BundledTasks)):
        return build_tasks(tasks, LayerCache(default_cache_root(os.environ)), progress or Silent())
    return None


def gold_patches(tasks: TaskSet | None) -> Mapping[str, str]:
    """Task id -> gold patch, of the tasks that have one."""
    if tasks is None:
        return {}
    return {name: hidden.gold_patch for name, hidden in tasks.hidden.items() if hidden.gold_patch}


def read_profiles(directory: Path, gold: Mapping[str, str], *, phase: str | None = None) -> Iterator[Profile]:
    """The behaviour of each attempt of a run, but for the reference solver's.

    Args:
        gold: task id -> gold patch, where it is known.
        phase: only this one.

    Raises:
        StoreError: a trajectory cannot be read.
    """
    for trajectory in TrajectoryStore(directory).read(phase):
        if trajectory.phase != IMITATION or phase == IMITATION:
            yield profile(trajectory, gold.get(trajectory.task_id))


def analyse_run(directory: Path, *, phase: str | None = None, gold: str = "auto") -> dict[str, Any]:
    """What the agent of a run does.

    Args:
        directory: the run.
        phase: only this one, such as "after_heldout".
        gold: where gold patches come from; see `tasks_of_run`.

    Returns:
        all (of every attempt) and phases (phase -> the same), as `summarise`; solved against unsolved, as
        `compare_solved`; drift over the training steps, as `drift`; gold_known (attempts whose gold patch is known).

    Raises:
        RunError: there is no such run, or no attempt in it.
    """
    run = read_run(directory)
    profiles = list(read_profiles(directory, gold_patches(tasks_of_run(run, gold)), phase=phase))
    if not profiles:
        where = f"the phase {phase!r} of {directory}" if phase else str(directory)
        raise RunError(f"{where} has no recorded attempts; wait for the first batch, or name another phase")
    by_phase: dict[str, list[Profile]] = {}
    for one in profiles:
        by_phase.setdefault(one.trajectory[0], []).append(one)
    training = [one for one in profiles if one.trajectory[0].startswith("train")]
    return {
        "all": summarise(profiles),
        "phases": {name: summarise(members) for name, members in by_phase.items()},
        **compare_solved(profiles),
        "drift": drift(training) if training else [],
        "gold_known": sum(one.gold is not None for one in profiles),
    }


def find_attempts(directory: Path, task_id: str, *, phase: str | None = None) -> list[Trajectory]:
    """The attempts at one task, in the order of the store.

    Raises:
        RunError: there are none.
    """
    found = [t for t in TrajectoryStore(directory).read(phase) if t.task_id == task_id]
    if not found:
        raise RunError(f"{directory} has no attempt at a task {task_id!r}; `deepswe view` lists the tasks")
    return found
