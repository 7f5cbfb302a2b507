"""Looking at a recipe's tasks, without a sandbox and without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deepswe.config import BundledTasks, CustomTasks, FrozenLakeTasks, MicroTasks, Recipe, TaskSetTasks
from deepswe.envs.base import Suite
from deepswe.envs.custom import load_suite
from deepswe.envs.frozenlake import FrozenLakeSuite
from deepswe.envs.prompts import opening_messages
from deepswe.envs.suites import build_tasks, check_runnable
from deepswe.errors import ConfigError, TaskError
from deepswe.grading.tree import ROOT
from deepswe.progress import Progress
from deepswe.session.interrupt import run_to_end
from deepswe.tasks.bundled import load_catalogue, select_recipes
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.micro.generate import named_micro_task
from deepswe.tasks.taskset import load_task_set
from deepswe.tools.catalog import TOOLS
from deepswe.types import Message


def count_tasks(recipe: Recipe, *, progress: Progress) -> dict[str, int]:
    """Build the recipe's tasks and count them by split.

    Raises:
        DeepsweError: they cannot be built, or the recipe's sandboxes cannot run them.
    """
    names = dict.fromkeys(("train", *recipe.evaluation.splits))
    if isinstance(recipe.tasks, FrozenLakeTasks | CustomTasks):
        suite = _suite(recipe.tasks)
        return {name: len(suite.split(name)) for name in names}
    cache = LayerCache.default()
    tasks = build_tasks(recipe.tasks, cache, progress)
    check_runnable(tasks, recipe.sandbox.backend, cache)
    counts = Counter(task.split for task in tasks.tasks)
    return {name: counts[name] for name in names}


def task_text(recipe: Recipe, task_id: str) -> str:
    """The opening messages of a task, as the agent gets them; no other task is made or built for it.

    Raises:
        ConfigError: there is no such task.
    """
    if isinstance(recipe.tasks, FrozenLakeTasks | CustomTasks):
        messages = _opening(_suite(recipe.tasks), recipe, task_id)
    else:
        messages = opening_messages(_issue(recipe.tasks, task_id), recipe.agent, TOOLS, ROOT)
    return "\n\n".join(f"[{message.role}]\n{message.content}" for message in messages)


def _suite(tasks: FrozenLakeTasks | CustomTasks) -> Suite:
    return FrozenLakeSuite(tasks) if isinstance(tasks, FrozenLakeTasks) else load_suite(tasks)


def _opening(suite: Suite, recipe: Recipe, task_id: str) -> Sequence[Message]:
    splits = dict.fromkeys(("train", *recipe.evaluation.splits))
    found = next((task for split in splits for task in suite.split(split) if task.id == task_id), None)
    if found is None:
        raise ConfigError(f"there is no task {task_id!r} in the splits {', '.join(splits)}")
    env = suite.rehearse(found, seed=recipe.run.seed)

    async def start() -> Sequence[Message]:
        try:
            return await env.start()
        finally:
            await env.close()

    return run_to_end(start())


def _issue(tasks: MicroTasks | BundledTasks | TaskSetTasks, task_id: str) -> str:
    if isinstance(tasks, MicroTasks):
        try:
            return named_micro_task(tasks, task_id)[0].problem_statement
        except TaskError as error:
            raise ConfigError(str(error)) from error
    if isinstance(tasks, BundledTasks):
        issues = {row.id: row.issue for row in select_recipes(tasks, load_catalogue())}
    else:
        issues = {task.id: task.problem_statement for task in load_task_set(tasks.path).tasks}
    if task_id not in issues:
        known = f"there are {len(issues)}, such as {next(iter(issues))}" if issues else "there are none"
        raise ConfigError(f"there is no task {task_id!r} in the recipe's set; {known}")
    return issues[task_id]
