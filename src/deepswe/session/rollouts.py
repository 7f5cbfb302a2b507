"""Attempts without learning."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from deepswe.config import Recipe
from deepswe.envs.splits import check_split, tasks_of_split
from deepswe.envs.suites import open_suite
from deepswe.evaluation.run import evaluation_row
from deepswe.policy.base import Policy, Renderer
from deepswe.policy.scripted import ByteRenderer
from deepswe.progress import Progress
from deepswe.rollout.reference import noop_policy, reference_policy
from deepswe.rollout.scheduler import Batch
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.acting import open_policy
from deepswe.session.interrupt import run_to_end
from deepswe.session.parts import Parts
from deepswe.training.run import own_run
from deepswe.types import Trajectory

Actor = Literal["reference", "noop", "model"]


def run_rollouts(
    recipe: Recipe, *, actor: Actor, split: str, attempts: int, limit: int, resume: bool, progress: Progress
) -> dict[str, Any]:
    """Attempt the tasks of a split through the loop of training, without learning.

    Args:
        recipe: names the run directory in which the trajectories are kept.
        actor: the suite's reference solver, one that submits at once, or the recipe's model as it was loaded.
        split: which tasks.
        attempts: at each.
        limit: at most this many tasks; 0 takes all.
        resume: take up the batch if it was begun.
        progress: is told how far it is.

    Returns:
        pass_at_1 with its interval and counts, as `evaluation_row`.

    Raises:
        DeepsweError: also when the split is empty or no attempt has a verdict.
    """

    async def attempt(store: TrajectoryStore) -> tuple[Trajectory, ...]:
        async with open_suite(recipe, progress) as opened:
            parts = Parts(recipe, opened, store, progress)
            tasks = tasks_of_split(parts.suite, split)[: limit or None]
            batch = Batch(f"{actor}_{split}", 0, tasks, attempts, recipe.evaluation.temperature)
            async with _acting(parts, actor, batch) as (policy, renderer):
                scheduler = parts.scheduler(policy, renderer, count_tokens=actor == "model")
                return await parts.collect(scheduler, batch, f"{actor}: {split}")

    check_split(recipe, split)
    with own_run(recipe, resume=resume) as run:
        return evaluation_row(run_to_end(attempt(TrajectoryStore(run.path))))


@asynccontextmanager
async def _acting(parts: Parts, actor: Actor, batch: Batch) -> AsyncIterator[tuple[Policy, Renderer]]:
    if actor == "model":
        loaded = parts.load_model()
        async with open_policy(parts, loaded) as (policy, _):
            yield policy, parts.renderer(loaded)
    else:
        renderer = ByteRenderer()
        if actor == "noop":
            yield noop_policy(renderer, parts.recipe.agent), renderer
        else:
            yield reference_policy(parts.suite, batch, renderer, seed=parts.recipe.run.seed), renderer
