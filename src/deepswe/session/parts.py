"""What every kind of run is put together from."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from deepswe.allocator import keep_freed_memory
from deepswe.config import Recipe
from deepswe.cores import usable_cores
from deepswe.envs.suites import OpenSuite
from deepswe.errors import ConfigError
from deepswe.policy.base import Policy, Renderer
from deepswe.policy.embedded import EmbeddedPolicy, cache_limit, free_memory, useful_threads
from deepswe.policy.models import LoadedModel, load_policy_model
from deepswe.policy.render import Renderer as ChatRenderer
from deepswe.progress import Progress
from deepswe.rollout.scheduler import Batch, Scheduler, collect_recorded
from deepswe.rollout.store import TrajectoryStore
from deepswe.training.lora import add_lora
from deepswe.training.sharded import processes, processes_here
from deepswe.types import Trajectory

LOCKSTEP_WIDTH = 32
"""Attempts in flight in deterministic mode unless the recipe says: a number that no machine changes."""

UNCOUNTED = {"max_tokens": 1 << 30, "max_turn_tokens": 1 << 30}
"""Limits on tokens that nothing reaches."""

STILL_TO_COME = 12
"""Bytes of a trained parameter's gradient and moments, which the learner takes after the engine has opened."""


class Parts:
    """A recipe with its open suite and its store: makes models, engines and schedulers, and collects batches."""

    def __init__(self, recipe: Recipe, opened: OpenSuite, store: TrajectoryStore, progress: Progress) -> None:
        self.recipe, self.suite, self.store, self.progress = recipe, opened.suite, store, progress
        self.counters, self.weights = opened.counters, opened.weights
        self._capacity = opened.capacity
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        keep_freed_memory()
        torch.set_num_threads(recipe.run.threads or max(1, usable_cores() // processes_here()))

    @property
    def autocast(self) -> bool:
        """Whether the learner's forward passes run in bfloat16."""
        return self.recipe.model.dtype == "bfloat16"

    def load_model(self) -> LoadedModel:
        """The recipe's model as it is before any training, with adapters where it has them, on the GPU if there is one.

        Where several processes train it, it stays on the CPU, whole, until it is sharded.
        """
        config, seed = self.recipe.model, self.recipe.run.seed
        loaded = load_policy_model(config, corpus=self.suite.corpus(), seed=seed)
        alone = processes() == 1 and not self.recipe.training.cpu_offload
        if config.lora.rank:
            add_lora(loaded.model, config.lora, seed=seed, narrow=self.autocast and alone)
        if torch.cuda.is_available() and alone:
            loaded.model.to("cuda")  # type: ignore[arg-type]
        return loaded

    def renderer(self, loaded: LoadedModel) -> ChatRenderer:
        """The model's own chat template; with native calls and a full prompt, it declares the suite's tools.

        Raises:
            PolicyError: the template does not serve.
        """
        agent = self.recipe.agent
        native = agent.format == "native" and agent.prompt == "full"
        return ChatRenderer(loaded.tokenizer, tools=self.suite.tools() if native else (), thinking=agent.thinking)

    def engine(self, loaded: LoadedModel) -> EmbeddedPolicy:
        """An engine over that very model; a context. In deterministic mode no machine sets the size of its cache."""
        free = None if self.recipe.run.deterministic else _left(loaded.model)
        return EmbeddedPolicy(
            loaded.model,
            threads=self.recipe.run.threads or useful_threads(loaded.model, torch.get_num_threads()),
            deterministic=self.recipe.run.deterministic,
            autocast=torch.bfloat16 if self.recipe.engine_dtype == "bfloat16" else None,
            cache_bytes=cache_limit(self.recipe.engine.cache_gib, free),
        )

    def scheduler(
        self, policy: Policy, renderer: Renderer, *, rehearsal: bool = False, count_tokens: bool = True
    ) -> Scheduler:
        """A scheduler with the recipe's limits and seeds.

        Args:
            policy, renderer: who acts, and in which tokens.
            rehearsal: attempts are not graded.
            count_tokens: False lifts the limits on tokens, for a script whose tokens are not the model's.

        Raises:
            ConfigError: deterministic mode asks for more attempts in flight than there can be sandboxes.
        """
        recipe = self.recipe
        wanted = recipe.rollout.concurrency or (LOCKSTEP_WIDTH if recipe.run.deterministic else self._capacity)
        if recipe.run.deterministic and wanted > self._capacity:
            raise ConfigError(
                f"run.deterministic keeps {wanted} attempts in flight, but only {self._capacity} sandboxes may be "
                "alive at once; lower rollout.concurrency or raise sandbox.concurrency"
            )
        return Scheduler(
            self.suite,
            policy,
            renderer,
            rollout=recipe.rollout if count_tokens else recipe.rollout.model_copy(update=UNCOUNTED),
            agent=recipe.agent,
            concurrency=min(wanted, self._capacity),
            seed=recipe.run.seed,
            rehearsal=rehearsal,
        )

    async def collect(self, scheduler: Scheduler, batch: Batch, stage: str) -> tuple[Trajectory, ...]:
        """A recorded batch, with a progress bar of its own; without one where `stage` is empty."""
        if stage:
            self.progress.begin(stage, len(batch.tasks) * batch.attempts)
        return await collect_recorded(
            scheduler,
            self.store,
            batch,
            keep=not self.recipe.run.deterministic,
            on_done=lambda trajectory: self.progress.advance() if stage else None,
        )


def _left(model: PreTrainedModel) -> float | None:
    """Bytes that a GPU has left for the engine's cache and the learner's activations; None on a CPU."""
    free = free_memory(next(model.parameters()).device)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return None if free is None else free - STILL_TO_COME * trained
