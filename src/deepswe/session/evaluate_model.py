"""Evaluation of a model that is loaded here: a checkpoint of a run, a Hugging Face model, the recipe's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deepswe.config import Recipe
from deepswe.policy.base import Policy, Renderer
from deepswe.policy.checkpoints import exported_model
from deepswe.policy.model_path import with_model_directory
from deepswe.progress import Progress
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.evaluate import Actor, Stage
from deepswe.session.parts import Parts


def with_checkpoint(recipe: Recipe, spec: str) -> Recipe:
    """The recipe with a run's checkpoint as its model, or with its own by the directory that it is loaded from.

    Args:
        recipe: whose model is replaced.
        spec: RUN for the newest checkpoint, or RUN@STEP; step 0 is the start of RL. Empty takes the recipe's own model.

    Raises:
        ConfigError: there is none, or it holds no model; or the recipe's path is neither a directory nor a run, and
            can be no name of the hub.
    """
    if not spec:
        return recipe.model_copy(update={"model": with_model_directory(recipe.model)})
    export = exported_model(spec)
    update = {"path": str(export), "gguf_file": "", "chat_template": ""}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})


def model_actor(recipe: Recipe, progress: Progress) -> Actor:
    """The recipe's model as it is loaded; see `with_checkpoint`."""

    @asynccontextmanager
    async def act(stage: Stage) -> AsyncIterator[tuple[Policy, Renderer]]:
        parts = Parts(stage.recipe, stage.opened, TrajectoryStore(stage.run), progress)
        loaded = parts.load_model()
        with parts.engine(loaded) as engine:
            yield engine, parts.renderer(loaded)

    name = recipe.model.path or "scratch"
    return Actor(name, {"kind": "model", "model": recipe.model.model_dump(mode="json")}, True, act)
