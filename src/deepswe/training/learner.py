"""The learner: groups of trajectories in, updated weights and a row of metrics out."""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from deepswe.algorithms.advantages import gae_of_sequence
from deepswe.algorithms.filters import Selection, select_groups
from deepswe.algorithms.losses import (
    PolicyLoss,
    clipped_policy_loss,
    importance_weights,
    kl_estimate,
    kl_penalty,
    reinforce_loss,
    value_loss,
)
from deepswe.algorithms.packing import MicroBatch, make_samples
from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.training.forward import TokenScorer, TokenScores, ValueHead, checkpoint_layers, composes
from deepswe.training.forward_rows import attend_along
from deepswe.training.learner_batch import MiniBatch, Prepared, emptied, make_mini_batch, share_actions, whiten
from deepswe.training.learner_metrics import Sums, advantage_row, age_row, batch_row, explained, moments, shared_row
from deepswe.training.optimiser import Optimiser
from deepswe.training.sharded import KeptWeights, Shards
from deepswe.types import Trajectory


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
        shards: Shards | None = None,
        full: Mapping[str, Tensor] | None = None,
        own_pass: bool | None = None,
    ) -> None:
        """Args:
        model: float32 parameters; trained in place.
        config, algorithm: the recipe's sections.
        max_tokens: `rollout.max_tokens`, the constant length when `algorithm.length` is 0.
        temperature: at which the sampler drew and gave log-probs.
        bfloat16: forward pass under autocast; with shards, these say it.
        shards: the processes that train together, each with a learner made alike and given the same calls; the model
            is sharded in place. None trains in this process alone.
        full: the whole weights, on process 0 alone, where other processes have the model on the meta device.
        own_pass: as of `TokenScorer`, where the two ways are compared.

        Raises:
            TrainingError: the model is not in float32, no causal LM, or cannot do what the configuration asks for.
        """
        self.model = model.eval()
        self.config = config
        self.algorithm = algorithm
        self._length = algorithm.length or max_tokens
        self._values = ValueHead.on(model) if algorithm.advantage == "gae" else None
        self._shards = shards
        self._device = next(model.parameters()).device if shards is None else shards.device
        composed = _tried(model, config, algorithm, shards)
        if config.packing != "padded":
            attend_along(model)
        self._make_scorer: Callable[..., TokenScorer] = lambda scored, **options: TokenScorer(
            scored,
            temperature=temperature,
            bfloat16=bfloat16 and shards is None,
            composed=composed,
            own_pass=own_pass,
            **options,
        )
        self._scorer = self._make_scorer(model, values=self._values, entropy_gradient=algorithm.entropy_coefficient > 0)
        self._start: Callable[[MicroBatch], TokenScores] | None = None
        if config.activation_checkpointing:
            checkpoint_layers(model)
        if shards is not None:
            shards.shard(model, self._scorer, full=full)
        self._optimiser = Optimiser(
            model if self._values is None else nn.ModuleList([model, self._values]),
            peak=config.learning_rate,
            warmup=config.warmup_steps,
            total=config.steps * config.updates_per_step * config.epochs,
            decay=config.decay,
            weight_decay=config.weight_decay,
            betas=config.betas,
            grad_clip=config.grad_clip,
        )

    @property
    def version(self) -> int:
        """Optimiser updates so far: the version of the weights."""
        return self._optimiser.updates

    @property
    def needs_start(self) -> bool:
        """Whether a copy of the weights at the start of RL is used, in the loss or to measure the distance."""
        return self.algorithm.kl_coefficient > 0 or self.algorithm.kl_start_every > 0

    def set_start(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Keep a frozen copy of the model as the start of RL: of these weights, or of the present ones.

        Where it is needed and was never called, the first update keeps the weights before it.
        """
        self._keep_start(weights)

    def _keep_start(self, weights: Mapping[str, Tensor] | None = None) -> None:
        if self._shards is not None:
            self._start = KeptWeights(self.model, self._scorer)
            for name, shard in (weights or {}).items():
                self._start.shards[name].copy_(shard)
            return
        start = copy.deepcopy(self.model)
        if weights is not None:
            start.load_state_dict(weights)
        self._start = self._make_scorer(start.requires_grad_(False).eval())

    def update(self, groups: Sequence[Sequence[Trajectory]], *, measure_start: bool = False) -> dict[str, float]:
        """Filter, score and train on a batch of groups, `epochs` times in `updates_per_step` mini-batches of whole
        groups.

        A mini-batch in which nothing trains makes no update. With one update the ratio to the sampler is 1 up to the
        numerical difference between engine and learner, so the clip acts only from the second update of a batch on,
        or on stale samples; `clip_low`, `clip_high` and `updates` say which it was.

        Args:
            groups: the attempts at each task.
            measure_start: measure the divergence from the start of RL, also where the loss does not need it.

        Returns:
            loss, grad_norm (mean over updates), learning_rate, entropy (nats a token), ratio (mean), ratio_max,
            clip_low and clip_high (shares of the trained tokens), kl_sampler (nats a token), advantage_mean, _std,
            _min and _max (over trained tokens), age_mean and age_max (updates, over trained trajectories), updates,
            tokens, trained_tokens, padding_share, groups, groups_uniform, groups_informative, and trajectories_* as
            counted by the filters; seconds. Where they are measured: kl_start (nats a token), importance_mean and
            importance_bound (share of weights at or outside their bounds), value_loss and value_explained (share of
            the targets' variance), shared (with packing "tree": share of the tokens that another one stood for).

        Raises:
            TrainingError: loss or gradient is not finite; the weights are those before the failed update.
        """
        started = time.perf_counter()
        if self.needs_start and self._start is None:
            self._keep_start()
        version, rate = self.version, self._optimiser.rate
        selections = select_groups(groups, self.algorithm, version=version)
        parts = _split_evenly(selections, self.config.updates_per_step)
        minis = [mini for part in parts if (mini := self._mini_batch(part)) is not None]
        sums = Sums()
        prepared = self._prepare(minis, sums, measure_start=measure_start)
        for _ in range(self.config.epochs):
            for micros in prepared:
                self._apply(micros, sums)
        if self._shards is not None:
            sums = self._together(sums, self._shards)
        whole = [mini.batches for mini in minis] if self._shards else [[m.batch for m in ms] for ms in prepared]
        return {
            **self._learnt(sums),
            "learning_rate": rate,
            **advantage_row([batch.advantage_N for batches in whole for batch in batches]),
            **age_row(selections, version),
            **batch_row(minis, selections),
            **(shared_row(minis) if self.config.packing == "tree" else {}),
            "updates": sums.values["updates"],
            "seconds": time.perf_counter() - started,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything for an exact resume but the start of RL: weights, optimiser, schedule, random state.

        With shards, the shards of this process; `deepswe.training.checkpoint_sharded` writes them.
        """
        return {
            "model": self.model.state_dict() if self._shards is None else get_model_state_dict(self.model),
            **({} if self._values is None else {"values": self._values.state_dict()}),
            "optimiser": self._optimiser.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state; the weights are copied into the module in place."""
        if self._shards is not None:
            set_model_state_dict(self.model, state["model"])
        else:
            self.model.load_state_dict(state["model"])
        if self._values is not None:
            self._values.load_state_dict(state["values"])
        self._optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"].cpu())

    def _mini_batch(self, selections: Sequence[Selection]) -> MiniBatch | None:
        samples = [
            make_samples(scored.trajectory, scored.advantages)
            for selection in selections
            for scored in selection.scored
        ]
        if not any(sample.trained for sequences in samples for sample in sequences):
            return None
        return make_mini_batch(
            samples,
            normalisation=self.algorithm.normalisation,
            trajectories=sum(selection.counts["total"] for selection in selections),
            length=self._length,
            budget=self.config.tokens_per_microbatch,
            device=self._device,
            packing=self.config.packing,
            multiple=1 if self._shards is None else self._shards.size,
        )

    @torch.no_grad()
    def _prepare(self, minis: Sequence[MiniBatch], sums: Sums, *, measure_start: bool) -> list[list[Prepared]]:
        """Old log-probs, importance weights, values and the start's log-probs, all before the first update."""
        algorithm = self.algorithm
        updates = len(minis) * self.config.epochs
        own = algorithm.old_logprobs == "learner" and algorithm.ratio != "none" and updates > 1
        start = self._start_scorer() if algorithm.kl_coefficient > 0 or measure_start else None
        prepared = []
        for mini in minis:
            actions = 0
            micros = []
            pairs = list(zip(mini.batches, mini.denominators, strict=True))
            for batch, denominator_N in pairs if self._shards is None else self._shards.share(pairs, emptied):
                made = Prepared(batch, denominator_N)
                if own or algorithm.importance != "none" or self._values is not None:
                    scores = self._scorer(batch)
                    made = self._with_old(made, scores.logp_N, sums, keep=own)
                    if scores.value_N is not None:
                        made = self._with_values(made, scores.value_N)
                        assert made.action_N is not None
                        actions += int(made.action_N.sum())
                if algorithm.old_logprobs == "sampler":
                    made = replace(made, old_logp_N=batch.sampler_logp_N)
                if start is not None:
                    made = replace(made, start_logp_N=start(batch).logp_N)
                micros.append(made)
            prepared.append([share_actions(micro, actions) for micro in micros])
        return whiten(prepared) if algorithm.whiten else prepared

    def _with_old(self, made: Prepared, logp_N: Tensor, sums: Sums, *, keep: bool) -> Prepared:
        batch, algorithm = made.batch, self.algorithm
        cap, floor = algorithm.importance_cap, algorithm.importance_floor
        weight_N = importance_weights(
            logp_N, batch.sampler_logp_N, batch.row_N, kind=algorithm.importance, cap=cap, floor=floor
        )
        if weight_N is not None:
            outside_N = (weight_N >= cap) | (weight_N <= floor)
            sums.add(importance=float(weight_N.sum()), importance_bound=float(outside_N.sum()), weighed=len(weight_N))
        return replace(made, old_logp_N=logp_N if keep else None, weight_N=weight_N)

    def _with_values(self, made: Prepared, value_N: Tensor) -> Prepared:
        """Advantages, targets and beginnings of actions; until here the batch's advantages are rewards."""
        batch, algorithm = made.batch, self.algorithm
        advantage_N, target_N = torch.zeros_like(value_N), torch.zeros_like(value_N)
        action_N = torch.zeros_like(value_N)
        for row in range(int(batch.row_N.max()) + 1):
            where = (batch.row_N == row).nonzero()[:, 0]
            found = gae_of_sequence(
                value_N[where].tolist(),
                batch.turn_N[where].tolist(),
                float(batch.advantage_N[where[0]]),
                by_turn=algorithm.advantage_level == "step",
                discount=algorithm.discount,
                lam=algorithm.gae_lambda,
            )
            for tensor, values in zip((advantage_N, target_N, action_N), found, strict=True):
                tensor[where] = torch.tensor(values, dtype=tensor.dtype, device=tensor.device)
        batch = replace(batch, advantage_N=advantage_N)
        return replace(made, batch=batch, target_N=target_N, action_N=action_N)

    def _start_scorer(self) -> Callable[[MicroBatch], TokenScores]:
        if self._start is None:
            self._keep_start()
        assert self._start is not None
        return self._start

    def _apply(self, micros: Sequence[Prepared], sums: Sums) -> None:
        for micro in micros:
            loss = self._loss(micro, sums)
            value = float(loss.detach())
            # With shards, what is not finite here shows in the norm of the gradient on every process at once.
            if not math.isfinite(value) and self._shards is None:
                self._optimiser.clear()
                raise TrainingError(
                    f"the loss of update {self.version + 1} is {value}; the weights are unchanged: resume from the "
                    "last checkpoint with a lower training.learning_rate, and check the sampler's log-probs if it "
                    "recurs"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            sums.add(loss=value)
        sums.add(grad_norm=self._optimiser.step(), updates=1)

    def _together(self, sums: Sums, shards: Shards) -> Sums:
        """The sums of all processes; what each has of a whole update is not added."""
        common = {name: sums.values.pop(name, 0.0) for name in ("grad_norm", "updates")}
        added = shards.add(sums.values, greatest=sums.greatest)
        return Sums(defaultdict(float, added | common))

    def _loss(self, micro: Prepared, sums: Sums) -> Tensor:
        algorithm, batch = self.algorithm, micro.batch
        scores = self._scorer(batch)
        policy = self._policy_loss(micro, scores.logp_N)
        loss = policy.loss
        detached_N = scores.logp_N.detach()
        if micro.start_logp_N is not None:
            kl_N = kl_penalty(scores.logp_N, micro.start_logp_N, kind=algorithm.kl)
            if algorithm.kl_coefficient:
                loss = loss + algorithm.kl_coefficient * (kl_N / micro.denominator_N).sum()
            sums.add(
                kl_start=float(kl_penalty(detached_N, micro.start_logp_N, kind="k3").sum()), measured=len(detached_N)
            )
        if algorithm.entropy_coefficient:
            loss = loss - algorithm.entropy_coefficient * (scores.entropy_N / micro.denominator_N).sum()
        if scores.value_N is not None and micro.target_N is not None and micro.action_N is not None:
            error = value_loss(scores.value_N, micro.target_N, micro.action_N)
            loss = loss + algorithm.value_coefficient * error
            sums.add(value_loss=float(error.detach()), **moments(scores.value_N.detach(), micro.target_N))
        sums.add(
            tokens=len(detached_N),
            entropy=float(scores.entropy_N.detach().sum()),
            ratio=float(policy.ratio_sum),
            clip_low=float(policy.clipped_low),
            clip_high=float(policy.clipped_high),
            kl_sampler=float(kl_estimate(detached_N, batch.sampler_logp_N).sum()),
        )
        sums.raise_to(ratio_max=float(policy.ratio_max))
        return loss

    def _policy_loss(self, micro: Prepared, logp_N: Tensor) -> PolicyLoss:
        algorithm, batch = self.algorithm, micro.batch
        if algorithm.ratio == "none":
            return reinforce_loss(logp_N, batch.advantage_N, micro.denominator_N, weight_N=micro.weight_N)
        return clipped_policy_loss(
            logp_N,
            logp_N.detach() if micro.old_logp_N is None else micro.old_logp_N,
            batch.advantage_N,
            micro.denominator_N,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            row_N=batch.row_N,
            level=algorithm.ratio,
            weight_N=micro.weight_N,
        )

    def _learnt(self, sums: Sums) -> dict[str, float]:
        row = {
            "loss": sums.mean("loss", "updates"),
            "grad_norm": sums.mean("grad_norm", "updates"),
            **{name: sums.mean(name, "tokens") for name in ("entropy", "ratio", "clip_low", "clip_high", "kl_sampler")},
            "ratio_max": sums.values["ratio_max"],
        }
        if sums.values["measured"]:
            row["kl_start"] = sums.mean("kl_start", "measured")
        if sums.values["weighed"]:
            row["importance_mean"] = sums.mean("importance", "weighed")
            row["importance_bound"] = sums.mean("importance_bound", "weighed")
        if self._values is not None:
            row["value_loss"] = sums.mean("value_loss", "updates")
            row["value_explained"] = explained(sums)
        return row


def _tried(model: nn.Module, config: TrainingConfig, algorithm: AlgorithmConfig, shards: Shards | None) -> bool | None:
    """What `composes` said of the model, after it was tried whether it can do what the configuration asks for."""
    if shards is not None and (algorithm.advantage == "gae" or algorithm.whiten):
        raise TrainingError(
            f"algorithm.advantage {algorithm.advantage!r} with whiten {algorithm.whiten} needs the tokens of a whole "
            "batch in one process; train in one, or use another advantage without whiten"
        )
    here = None
    if not any(parameter.is_meta for parameter in model.parameters()):
        here = composes(model)
    return here if shards is None else shards.agreed(here)


def _split_evenly(selections: Sequence[Selection], parts: int) -> list[Sequence[Selection]]:
    """Contiguous parts whose sizes differ by at most one; whole groups."""
    bounds = [len(selections) * part // parts for part in range(parts + 1)]
    return [selections[start:end] for start, end in pairwise(bounds)]
