"""Evaluation of a model that is loaded here: a checkpoint of a run, a Hugging Face model, the recipe's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deepswe.config import Recipe
from deepswe.errors import ConfigError
from deepswe.policy.base import Policy, Renderer
from deepswe.policy.model_path import check_model
from deepswe.progress import Progress
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.evaluate import Actor, Stage
from deepswe.session.parts import Parts
from deepswe.training.checkpoint import all_checkpoints


def with_checkpoint(recipe: Recipe, spec: str) -> Recipe:
    """The recipe with a run's checkpoint as its model.

    Args:
        recipe: whose model is replaced.
        spec: RUN for the newest checkpoint, or RUN@STEP.

    Raises:
        ConfigError: there is none, or it holds no model.
    """
    name, _, step = spec.partition("@")
    if step and not step.isdigit():
        raise ConfigError(f"--checkpoint {spec}: {step!r} is no step; write RUN@STEP, such as runs/quickstart@100")
    steps = {found.step: found for found in all_checkpoints(Path(name) / "checkpoints" / "training")}
    wanted = int(step) if step else max(steps, default=0)
    if wanted not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{name} has no checkpoint{f' of step {step}' if step else ''}; there are: {there}")
    export = steps[wanted].export
    if not export.is_dir():
        raise ConfigError(f"{steps[wanted].path} holds no model; name another checkpoint")
    update = {"path": str(export), "gguf_file": "", "chat_template": ""}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})


def model_actor(recipe: Recipe, progress: Progress) -> Actor:
    """The recipe's model as it is loaded.

    Raises:
        ConfigError: its path is no directory, and can be no name of the hub.
    """
    check_model(recipe.model.path)

    @asynccontextmanager
    async def act(stage: Stage) -> AsyncIterator[tuple[Policy, Renderer]]:
        parts = Parts(stage.recipe, stage.opened, TrajectoryStore(stage.run), progress)
        loaded = parts.load_model()
        with parts.engine(loaded) as engine:
            yield engine, parts.renderer(loaded)

    name = recipe.model.path or "scratch"
    return Actor(name, {"kind": "model", "model": recipe.model.model_dump(mode="json")}, True, act)
