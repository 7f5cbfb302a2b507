"""Who samples, by the recipe: the embedded engine over the learner's own module, or vLLM servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deepswe.config import Recipe
from deepswe.errors import ConfigError
from deepswe.policy.base import Policy
from deepswe.policy.models import LoadedModel
from deepswe.policy.vllm import VllmPolicy
from deepswe.session.parts import Parts
from deepswe.training.checkpoint_export import is_plain, whole_weights
from deepswe.training.loop import Updatable
from deepswe.training.weights import FileTransfer, Transfer, VllmWeights
from deepswe.training.weights_file import NamedWeights, safetensors_writer, scorer, tied_names, with_copies
from deepswe.training.weights_native import NativeTransfer


@asynccontextmanager
async def open_policy(
    parts: Parts, loaded: LoadedModel, weights: NamedWeights | None = None
) -> AsyncIterator[tuple[Policy, Updatable]]:
    """The recipe's engine, and how new weights get to it.

    Args:
        parts: of the run.
        loaded: the model; the embedded engine samples from it.
        weights: gives the learner's weights, whole; None takes those of `loaded`.

    Raises:
        ConfigError: the servers cannot do what the recipe asks for.
        PolicyError: they do not answer.
    """
    recipe = parts.recipe
    if recipe.engine.backend == "embedded":
        with parts.engine(loaded) as engine:
            yield engine, engine
        return
    async with VllmPolicy(recipe.engine.vllm, in_flight=recipe.asynchrony.in_flight) as policy:
        if policy.context < recipe.rollout.max_tokens:
            raise ConfigError(
                f"the vLLM servers take {policy.context} tokens, fewer than rollout.max_tokens "
                f"{recipe.rollout.max_tokens}; start them with a larger --max-model-len"
            )
        for temperature in {recipe.rollout.temperature, recipe.evaluation.temperature}:
            await policy.check_temperature(temperature)
        given = weights or (lambda: whole_weights(loaded.model))
        transfer = _transfer(recipe, with_copies(given, tied_names(loaded.model) if recipe.engine.vllm.untied else {}))
        score = scorer(loaded.model, bfloat16=parts.autocast) if is_plain(loaded.model) else None
        async with VllmWeights(policy, transfer, score) as updatable:
            yield policy, updatable


def _transfer(recipe: Recipe, weights: NamedWeights) -> Transfer:
    config = recipe.engine.vllm
    if config.transfer == "file":
        return FileTransfer(safetensors_writer(weights), config.directory, timeout_s=config.update_timeout_s)
    return NativeTransfer(weights, config.transfer, timeout_s=config.update_timeout_s)
