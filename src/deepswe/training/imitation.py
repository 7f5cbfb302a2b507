"""Imitation: supervised updates on recorded trajectories, for a model that knows nothing yet."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepswe.algorithms.packing import make_samples
from deepswe.config import ImitationConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.policy.base import Renderer
from deepswe.training.forward import TokenScorer
from deepswe.training.forward_rows import attend_along
from deepswe.training.learner_batch import make_mini_batch
from deepswe.training.optimiser import Decay, Optimiser
from deepswe.types import Message, TokenSpan, Trajectory

Record = Callable[[dict[str, float]], None]
"""Receives the row of each update."""


class Imitation:
    """Trains a causal LM in place to write what the trajectories' solver wrote.

    It has an optimiser and a schedule of its own: linear warm-up, then a fall to zero with the last update, so that
    RL afterwards starts from a settled model with fresh moments. The batch of an update is a pure function of the
    seed and its number, so a resumed run sees the same batches.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ImitationConfig,
        training: TrainingConfig,
        *,
        seed: int,
        bfloat16: bool = False,
        decay: Decay = "cosine",
    ) -> None:
        """Args:
        model: float32 parameters; trained in place.
        config: steps, batch size, rate, and which tokens are in the loss.
        training: weight decay, betas, gradient clip and the tokens of a micro-batch.
        seed: orders the trajectories.
        bfloat16: forward pass under autocast.
        decay: how the rate falls after the warm-up.
        """
        self.model = model.eval()
        self.config = config
        self._budget = training.tokens_per_microbatch
        self._packing = training.packing
        if self._packing != "padded":
            attend_along(model)
        self._seed = seed
        self._scorer = TokenScorer(model, bfloat16=bfloat16)
        self._optimiser = Optimiser(
            model,
            peak=config.learning_rate,
            warmup=config.warmup_steps,
            total=config.steps,
            decay=decay,
            weight_decay=training.weight_decay,
            betas=training.betas,
            grad_clip=training.grad_clip,
        )

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._optimiser.updates

    def run(self, trajectories: Sequence[Trajectory], record: Record, *, until: int | None = None) -> None:
        """Make the updates that are left.

        Args:
            trajectories: at least a batch of them; each should be one that is worth imitating.
            record: called after each update with step, loss (nats a token), grad_norm, learning_rate, entropy,
                tokens, trained_tokens, padding_share and seconds. It may save a checkpoint.
            until: stop after this many updates in all; `config.steps` if None.

        Raises:
            TrainingError: too few trajectories, or a loss or gradient that is not finite.
        """
        if len(trajectories) < self.config.batch_size:
            raise TrainingError(
                f"{len(trajectories)} trajectories to imitate, but imitation.batch_size is {self.config.batch_size}; "
                "raise imitation.trajectories or lower the batch size"
            )
        while self.updates < (self.config.steps if until is None else until):
            chosen = choose_batch(len(trajectories), self.config.batch_size, update=self.updates, seed=self._seed)
            record(self._update([trajectories[index] for index in chosen]))

    def state_dict(self) -> dict[str, Any]:
        """Everything for an exact resume."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state; the weights are copied into the module in place."""
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"].cpu())

    def _update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        started = time.perf_counter()
        mini = make_mini_batch(
            [make_samples(t, all_tokens=self.config.train_on == "all") for t in trajectories],
            normalisation="token_mean",
            trajectories=len(trajectories),
            length=1,
            budget=self._budget,
            device=next(self.model.parameters()).device,
            packing=self._packing,
        )
        loss = entropy = 0.0
        for batch in mini.batches:
            scores = self._scorer(batch)
            part = -scores.logp_N.sum() / mini.trained_tokens
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            entropy += float(scores.entropy_N.sum()) / mini.trained_tokens
        if not math.isfinite(loss):
            self._optimiser.clear()
            raise TrainingError(
                f"the imitation loss of update {self.updates + 1} is {loss}; the weights are unchanged: lower "
                "imitation.learning_rate or training.grad_clip"
            )
        rate = self._optimiser.rate
        norm = self._optimiser.step()
        return {
            "step": float(self.updates),
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "entropy": entropy,
            "tokens": float(mini.tokens),
            "trained_tokens": float(mini.trained_tokens),
            "padding_share": mini.padding_share,
            "seconds": time.perf_counter() - started,
        }


def choose_records(trajectories: Iterable[Trajectory], config: ImitationConfig) -> tuple[Trajectory, ...]:
    """The recorded trajectories that are worth imitating: rejection sampling by reward.

    Kept are those of the phase, with a verdict of at least the reward, at most so many of one task (the shortest), at
    most so many in all. The order is that of the record.
    """
    kept = [
        t
        for t in trajectories
        if t.reward is not None and t.reward >= config.min_reward and config.phase in ("", t.phase) and t.sampled_length
    ]
    if config.per_task:
        by_task: dict[str, list[Trajectory]] = {}
        for trajectory in kept:
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
        chosen = {
            id(t)
            for attempts in by_task.values()
            for t in sorted(attempts, key=lambda t: (t.sampled_length, t.key))[: config.per_task]
        }
        kept = [t for t in kept if id(t) in chosen]
    return tuple(kept[: config.trajectories])


def check_tokens(trajectories: Iterable[Trajectory], vocabulary: int) -> None:
    """Whether recorded tokens can be this model's own.

    Raises:
        TrainingError: one of them is outside the vocabulary.
    """
    for trajectory in trajectories:
        highest = max((token for span in trajectory.spans for token in span.tokens), default=0)
        if highest >= vocabulary:
            raise TrainingError(
                f"attempt {trajectory.attempt} at {trajectory.task_id} has the token {highest}, but the model knows "
                f"{vocabulary}: it is another model's; use imitation.source = 'text'"
            )


def write_anew(trajectory: Trajectory, messages: Sequence[Message], renderer: Renderer) -> Trajectory:
    """A recorded trajectory in another model's tokens: its turns are sampled, with log-probs of 0; the rest is not.

    Args:
        trajectory: of any model; its turns and observations are read as text.
        messages: the opening of its task.
        renderer: of the model that will imitate.
    """
    spans = [TokenSpan(renderer.opening(messages), False)]
    for number, step in enumerate(trajectory.steps, start=1):
        tokens = renderer.completion(step.completion)
        spans.append(TokenSpan(tokens, True, (0.0,) * len(tokens)))
        if number < len(trajectory.steps):
            spans.append(TokenSpan(renderer.observation(step.observation), False))
    return replace(trajectory, spans=tuple(spans), starts=())


def choose_batch(count: int, size: int, *, update: int, seed: int) -> list[int]:
    """The indices of one update: each epoch is a new permutation, cut into whole batches.

    Args:
        count: trajectories, at least `size`.
        size: of a batch.
        update: counted from 0.
        seed: orders the epochs.
    """
    epoch, position = divmod(update, count // size)
    order = list(range(count))
    random.Random(f"imitation/{seed}/{epoch}").shuffle(order)
    return order[position * size : (position + 1) * size]
