"""From a recipe to its suite: tasks built, a sandbox pool open where the tasks need one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deepswe.config import BundledTasks, CustomTasks, FrozenLakeTasks, MicroTasks, Recipe, TaskSetTasks
from deepswe.envs.base import Suite
from deepswe.envs.custom import load_suite
from deepswe.envs.frozenlake import FrozenLakeSuite
from deepswe.envs.solvers import Solver, gold_solver
from deepswe.envs.swe import SweSuite
from deepswe.errors import ConfigError
from deepswe.grading.tree import Workshop
from deepswe.progress import Progress
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.tasks.bundled import bundled_task_set
from deepswe.tasks.difficulty import weights
from deepswe.tasks.layers import LayerCache, default_cache_root
from deepswe.tasks.select import select_tasks
from deepswe.tasks.synth.micro.kept import kept_micro_task_set
from deepswe.tasks.synth.micro.solver import micro_solver
from deepswe.tasks.task import HiddenTests, Task, TaskSet
from deepswe.tasks.taskset import load_task_set
from deepswe.types import ToolCall

UNBOUNDED = 1 << 16
"""Attempts in flight where no sandbox limits them."""


@dataclass(frozen=True, slots=True)
class OpenSuite:
    """A suite ready for attempts.

    Attributes:
        suite: the tasks and their environments.
        capacity: attempts that can be in flight at once.
        counters: running counts worth logging, such as test runs.
        weights: how often each task of the split "train" is drawn; empty treats all alike.
    """

    suite: Suite
    capacity: int
    counters: Callable[[], Mapping[str, int]] = dict
    weights: tuple[float, ...] = ()


@asynccontextmanager
async def open_suite(recipe: Recipe, progress: Progress, *, mistakes: float = 0.0) -> AsyncIterator[OpenSuite]:
    """The recipe's suite for the length of the block.

    Args:
        recipe: names the tasks and the sandboxes.
        progress: told of what is built.
        mistakes: chance that an edit of the reference solver is a guess, where its attempts are to be imitated.

    Raises:
        DeepsweError: the tasks cannot be built, or this machine cannot run the sandbox backend, or does not enforce a
            limit that the recipe sets.
    """
    if isinstance(recipe.tasks, FrozenLakeTasks):
        yield OpenSuite(FrozenLakeSuite(recipe.tasks), UNBOUNDED)
        return
    if isinstance(recipe.tasks, CustomTasks):
        yield OpenSuite(load_suite(recipe.tasks), recipe.tasks.capacity or UNBOUNDED)
        return
    cache = LayerCache(default_cache_root(os.environ))
    async with SandboxPool(recipe.sandbox, recipe.run.name) as pool:
        # A thread, so that an interrupt does not wait for a build.
        tasks = await asyncio.to_thread(build_tasks, recipe.tasks, cache, progress)
        check_runnable(tasks, recipe.sandbox.backend, cache)
        await pool.check(next((task.image.name for task in tasks.tasks if task.image is not None), ""))
        workshop = Workshop(pool.open, cache.path, limits_of(recipe.sandbox), {"run": recipe.run.name})
        suite = SweSuite(tasks, workshop, recipe.agent, solver=_solver(recipe, mistakes))

        def counters() -> dict[str, int]:
            return {"grade_runs": suite.counts.runs, "grade_reused": suite.counts.reuses}

        yield OpenSuite(suite, pool.concurrency, counters, _weights(recipe, tasks))


def check_runnable(tasks: TaskSet, backend: str, cache: LayerCache) -> None:
    """Find out now that a backend has no images, that a layer is not built, or cannot be where sandboxes are.

    Raises:
        ConfigError: it cannot run one of the tasks.
    """
    for task in tasks.tasks:
        if task.image is not None and backend == "bubblewrap":
            raise ConfigError(
                f"task {task.id} runs in the image {task.image.name}, and sandbox.backend bubblewrap has no images; "
                "choose a container backend"
            )
        for key in (task.repository.base, task.repository.environment):
            if key is not None and backend == "kubernetes":
                raise ConfigError(
                    f"task {task.id} has the layer {key}, which lies on this machine, and pods run on others; use "
                    "tasks with images, or another sandbox.backend"
                )
            if key is not None and key not in cache:
                raise ConfigError(
                    f"layer {key} of task {task.id} is not in the cache {cache.root}; "
                    "build it with `deepswe tasks restore`"
                )


def build_tasks(tasks: MicroTasks | BundledTasks | TaskSetTasks, cache: LayerCache, progress: Progress) -> TaskSet:
    """The tasks that a recipe names, generated, built into the cache, or read from their file.

    Raises:
        DeepsweError: they cannot be.
    """
    if isinstance(tasks, MicroTasks):
        return kept_micro_task_set(tasks, cache, progress)
    if isinstance(tasks, TaskSetTasks):
        return select_tasks(load_task_set(tasks.path), tasks)
    return bundled_task_set(tasks, cache, progress)


def _weights(recipe: Recipe, tasks: TaskSet) -> tuple[float, ...]:
    if not isinstance(recipe.tasks, TaskSetTasks):
        return ()
    sampler = recipe.tasks.sampler
    training = tasks.only([task.id for task in tasks.split("train")])
    return weights(training, sampler.scheme, low=sampler.low, high=sampler.high, unrated=sampler.unrated)


def _solver(recipe: Recipe, mistakes: float) -> Solver:
    def solve(task: Task, hidden: HiddenTests, seed: int) -> Generator[ToolCall, str, None]:
        return micro_solver(task, hidden, seed=seed, mistakes=mistakes)

    return solve if isinstance(recipe.tasks, MicroTasks) else gold_solver
