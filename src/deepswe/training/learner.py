"""The learner: groups of trajectories in, updated weights and a row of metrics out."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from deepswe.algorithms.filters import Selection, select_group
from deepswe.algorithms.losses import DENOMINATORS, clipped_policy_loss, kl_estimate
from deepswe.algorithms.packing import (
    MicroBatch,
    TrainingSample,
    collate,
    make_sample,
    padding_share,
    split_by_tokens,
)
from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.training.forward import TokenScorer
from deepswe.training.optimiser import Optimiser
from deepswe.types import Trajectory


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The samples of one optimiser update, already cut into micro-batches.

    Attributes:
        batches: padded micro-batches.
        denominators: for each micro-batch, the denominator of each of its tokens; taken over all samples.
        samples, tokens, trained_tokens: in all, without padding.
        padding_share: of the computed tokens.
    """

    batches: list[MicroBatch]
    denominators: list[Tensor]
    samples: int
    tokens: int
    trained_tokens: int
    padding_share: float


@dataclass
class _Sums:
    """Token statistics of one `update`, added over micro-batches and mini-batches."""

    values: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.values[name] += amount

    def mean(self, name: str, over: str) -> float:
        return self.values[name] / self.values[over] if self.values[over] else 0.0


class Learner:
    """Trains a causal LM in place, so that an engine which shares the module sees each update at once.

    The model is put into `eval()` mode: a policy's log-probs must not depend on dropout.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        algorithm: AlgorithmConfig,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        bfloat16: bool = False,
    ) -> None:
        """Args:
        model: float32 parameters; trained in place.
        config, algorithm: the recipe's sections.
        max_tokens: `rollout.max_tokens`, the constant length when `algorithm.length` is 0.
        temperature: at which the sampler drew and gave log-probs.
        bfloat16: forward pass under autocast.

        Raises:
            TrainingError: the model is not in float32 or no causal LM.
        """
        self.model = model.eval()
        self.config = config
        self.algorithm = algorithm
        self._length = algorithm.length or max_tokens
        self._scorer = TokenScorer(model, temperature=temperature, bfloat16=bfloat16)
        self._optimiser = Optimiser(
            model,
            peak=config.learning_rate,
            warmup=config.warmup_steps,
            total=config.steps * config.updates_per_step,
            decay=config.decay,
            weight_decay=config.weight_decay,
            betas=config.betas,
            grad_clip=config.grad_clip,
        )

    @property
    def version(self) -> int:
        """Optimiser updates so far: the version of the weights."""
        return self._optimiser.updates

    def update(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Filter, score and train on a batch of groups, in `updates_per_step` mini-batches of whole groups.

        A mini-batch in which nothing trains makes no update. With one update the ratio to the sampler is 1 up to the
        numerical difference between engine and learner, so the clip acts only from the second update of a batch on,
        or on stale samples; `clip_low`, `clip_high` and `updates` say which it was.

        Returns:
            loss, grad_norm (mean over updates), learning_rate, entropy (nats a token), ratio (mean), clip_low and
            clip_high (shares of the trained tokens), kl_sampler (nats a token), updates, tokens, trained_tokens,
            padding_share, groups, groups_uniform, and trajectories_* as counted by the filters; seconds.

        Raises:
            TrainingError: loss or gradient is not finite; the weights are those before the failed update.
        """
        started = time.perf_counter()
        selections = [select_group(group, self.algorithm) for group in groups]
        parts = _split_evenly(selections, self.config.updates_per_step)
        minis = [mini for part in parts if (mini := self._mini_batch(part)) is not None]
        rate = self._optimiser.rate
        old = self._old_logprobs(minis)
        sums = _Sums()
        for mini, old_logps in zip(minis, old, strict=True):
            self._apply(mini, old_logps, sums)
        counts: Counter[str] = Counter()
        for selection in selections:
            counts.update(selection.counts)
        computed = sum(mini.tokens / (1.0 - mini.padding_share) for mini in minis)
        return {
            "loss": sums.mean("loss", "updates"),
            "grad_norm": sums.mean("grad_norm", "updates"),
            "learning_rate": rate,
            "entropy": sums.mean("entropy", "tokens"),
            "ratio": sums.mean("ratio", "tokens"),
            "clip_low": sums.mean("clip_low", "tokens"),
            "clip_high": sums.mean("clip_high", "tokens"),
            "kl_sampler": sums.mean("kl_sampler", "tokens"),
            "updates": float(len(minis)),
            "tokens": float(sum(mini.tokens for mini in minis)),
            "trained_tokens": float(sum(mini.trained_tokens for mini in minis)),
            "padding_share": 1.0 - sum(mini.tokens for mini in minis) / computed if computed else 0.0,
            "groups": float(len(groups)),
            "groups_uniform": float(sum(selection.uniform for selection in selections)),
            **{
                f"trajectories_{name}": float(counts[name])
                for name in ("total", "trained", "masked", "ungraded", "uniform", "lonely")
            },
            "seconds": time.perf_counter() - started,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything for an exact resume: weights, optimiser, schedule, random state."""
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

    def _mini_batch(self, selections: Sequence[Selection]) -> MiniBatch | None:
        samples = [
            make_sample(scored.trajectory, scored.advantage) for selection in selections for scored in selection.scored
        ]
        if not samples:
            return None
        return make_mini_batch(
            samples,
            normalisation=self.algorithm.normalisation,
            trajectories=sum(selection.counts["total"] for selection in selections),
            length=self._length,
            budget=self.config.tokens_per_microbatch,
            device=next(self.model.parameters()).device,
        )

    @torch.no_grad()
    def _old_logprobs(self, minis: Sequence[MiniBatch]) -> list[list[Tensor | None]]:
        """For each micro-batch the denominator of the ratio; None means the current log-probs themselves."""
        if self.algorithm.old_logprobs == "sampler":
            return [[batch.sampler_logp_N for batch in mini.batches] for mini in minis]
        first: list[list[Tensor | None]] = [[None] * len(mini.batches) for mini in minis[:1]]
        return first + [[self._scorer(batch).logp_N for batch in mini.batches] for mini in minis[1:]]

    def _apply(self, mini: MiniBatch, old_logps: Sequence[Tensor | None], sums: _Sums) -> None:
        for batch, denominator_N, old_logp_N in zip(mini.batches, mini.denominators, old_logps, strict=True):
            scores = self._scorer(batch)
            policy = clipped_policy_loss(
                scores.logp_N,
                scores.logp_N.detach() if old_logp_N is None else old_logp_N,
                batch.advantage_N,
                denominator_N,
                clip_low=self.algorithm.clip_low,
                clip_high=self.algorithm.clip_high,
            )
            loss = float(policy.loss.detach())
            if not math.isfinite(loss):
                self._optimiser.clear()
                raise TrainingError(
                    f"the loss of update {self.version + 1} is {loss}; the weights are unchanged: resume from the last "
                    "checkpoint with a lower training.learning_rate, and check the sampler's log-probs if it recurs"
                )
            policy.loss.backward()  # type: ignore[no-untyped-call]
            sums.add(
                loss=loss,
                tokens=len(scores.logp_N),
                entropy=float(scores.entropy_N.sum()),
                ratio=float(policy.ratio_sum),
                clip_low=float(policy.clipped_low),
                clip_high=float(policy.clipped_high),
                kl_sampler=float(kl_estimate(scores.logp_N.detach(), batch.sampler_logp_N).sum()),
            )
        sums.add(grad_norm=self._optimiser.step(), updates=1)


def make_mini_batch(
    samples: Sequence[TrainingSample],
    *,
    normalisation: str,
    trajectories: int,
    length: int,
    budget: int,
    device: torch.device,
) -> MiniBatch:
    """Cut samples into micro-batches; the denominators are those of all of them together.

    Args:
        samples: at least one.
        normalisation: a key of `DENOMINATORS`.
        trajectories: of the mini-batch before filtering.
        length: the constant length.
        budget: tokens of a micro-batch, padding included.
        device: where the micro-batches go.
    """
    trained = [sample.trained for sample in samples]
    denominators = torch.tensor(DENOMINATORS[normalisation](trained, trajectories=trajectories, length=length))
    lengths = [sample.length for sample in samples]
    split = split_by_tokens(lengths, budget)
    batches = [collate([samples[index] for index in indices]) for indices in split]
    return MiniBatch(
        batches=[batch.to(device) for batch in batches],
        denominators=[
            denominators[indices][batch.row_N].to(device) for indices, batch in zip(split, batches, strict=True)
        ],
        samples=len(samples),
        tokens=sum(lengths),
        trained_tokens=sum(trained),
        padding_share=padding_share(lengths, split),
    )


def _split_evenly(selections: Sequence[Selection], parts: int) -> list[Sequence[Selection]]:
    """Contiguous parts whose sizes differ by at most one; whole groups."""
    bounds = [len(selections) * part // parts for part in range(parts + 1)]
    return [selections[start:end] for start, end in pairwise(bounds)]
