"""Several processes for one recipe (torchrun): process 0 makes the run, the others hold shards and follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from deepswe.config import Recipe
from deepswe.errors import ConfigError
from deepswe.policy.models import LoadedModel
from deepswe.training.learner import Learner
from deepswe.training.lora import add_lora
from deepswe.training.sharded import Shards, open_shards, processes
from deepswe.training.sharded_leader import LeadingLearner, Orders, follow


@dataclass(frozen=True, slots=True)
class Team:
    """The processes that train one recipe together."""

    shards: Shards
    orders: Orders

    @property
    def leads(self) -> bool:
        """Whether this is the process that makes the run."""
        return self.shards.rank == 0


@contextmanager
def join_team(recipe: Recipe) -> Iterator[Team | None]:
    """Join the other processes until the block ends; None where this one trains alone and without shards.

    Raises:
        ConfigError: the recipe asks for what goes in one process only.
        TrainingError: the others cannot be reached.
    """
    if processes() == 1 and not recipe.training.cpu_offload:
        yield None
        return
    check_team(recipe)
    bfloat16 = recipe.model.dtype == "bfloat16"
    with open_shards(bfloat16=bfloat16, cpu_offload=recipe.training.cpu_offload) as shards:
        yield Team(shards, Orders())


def check_team(recipe: Recipe) -> None:
    """Whether a recipe can be trained by several processes.

    Raises:
        ConfigError: it cannot; with the setting to change.
    """
    algorithm = recipe.algorithm
    refused = {
        "engine.backend embedded samples with weights that no process has whole: use vllm": (
            recipe.engine.backend == "embedded"
        ),
        "imitation.steps trains in one process: imitate first, then start from its checkpoint with model.path": (
            recipe.imitation.steps > 0
        ),
        "algorithm.kl_coefficient and kl_start_every need the weights at the start of RL: set both to 0": (
            algorithm.kl_coefficient > 0 or algorithm.kl_start_every > 0
        ),
        "algorithm.advantage gae and whiten need a batch in one process: use another advantage": (
            algorithm.advantage == "gae" or algorithm.whiten
        ),
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    if reasons:
        raise ConfigError(
            f"{recipe.run.name} cannot be trained by {processes()} processes with shards: {'; '.join(reasons)}"
        )


def lead_learner(recipe: Recipe, loaded: LoadedModel, team: Team) -> LeadingLearner:
    """The learner of process 0; its model becomes that of all."""
    model = loaded.model
    team.shards.agreed((type(model), model.config))
    full = dict(model.state_dict())
    return LeadingLearner(model, **learner_options(recipe), shards=team.shards, orders=team.orders, full=full)


def follow_recipe(recipe: Recipe, team: Team) -> None:
    """The share of a process other than the first, until that one ends."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    made: tuple[Any, Any] = team.shards.agreed(None)
    kind, config = made
    with torch.device("meta"):
        model = kind(config)
    if recipe.model.lora.rank:
        add_lora(model, recipe.model.lora, seed=recipe.run.seed)
    learner = Learner(model, **learner_options(recipe), shards=team.shards)
    follow(learner, team.shards, team.orders)


def learner_options(recipe: Recipe) -> dict[str, Any]:
    """What a learner takes from a recipe."""
    return {
        "config": recipe.training,
        "algorithm": recipe.algorithm,
        "max_tokens": recipe.rollout.max_tokens,
        "temperature": recipe.rollout.temperature,
        "bfloat16": recipe.model.dtype == "bfloat16",
    }
