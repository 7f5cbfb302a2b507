"""The learner: groups of trajectories in, updated weights and a row of metrics out."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from deepswe.algorithms.advantages import gae_of_sequence, whitened
from deepswe.algorithms.filters import Selection, age, select_groups
from deepswe.algorithms.losses import (
    DENOMINATORS,
    PolicyLoss,
    clipped_policy_loss,
    importance_weights,
    kl_estimate,
    kl_penalty,
    reinforce_loss,
    value_loss,
)
from deepswe.algorithms.packing import (
    MicroBatch,
    TrainingSample,
    collate,
    make_samples,
    padding_share,
    split_by_tokens,
)
from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.training.forward import TokenScorer, ValueHead, check_packing
from deepswe.training.optimiser import Optimiser
from deepswe.types import Trajectory


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The samples of one optimiser update, already cut into micro-batches.

    Attributes:
        batches: micro-batches, padded or packed.
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


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A micro-batch with everything about it that an update does not change; per trained token.

    Attributes:
        old_logp_N: the denominator of the ratio; None means the current log-probs themselves.
        weight_N: importance weights, if any.
        start_logp_N: log-probs under the weights at the start of RL, if they are needed.
        target_N, action_N: targets of the values, and the weight of each in the value loss.
    """

    batch: MicroBatch
    denominator_N: Tensor
    old_logp_N: Tensor | None = None
    weight_N: Tensor | None = None
    start_logp_N: Tensor | None = None
    target_N: Tensor | None = None
    action_N: Tensor | None = None


@dataclass
class _Sums:
    """Token statistics of one `update`, added over micro-batches and mini-batches."""

    values: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.values[name] += amount

    def raise_to(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.values[name] = max(self.values[name], amount)

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
            TrainingError: the model is not in float32, no causal LM, or cannot do what the configuration asks for.
        """
        self.model = model.eval()
        self.config = config
        self.algorithm = algorithm
        self._length = algorithm.length or max_tokens
        self._values = ValueHead.on(model) if algorithm.advantage == "gae" else None
        self._make_scorer: Callable[..., TokenScorer] = lambda scored, **options: TokenScorer(
            scored, temperature=temperature, bfloat16=bfloat16, **options
        )
        self._scorer = self._make_scorer(model, values=self._values, entropy_gradient=algorithm.entropy_coefficient > 0)
        self._start: TokenScorer | None = None
        if config.packing == "packed":
            check_packing(model)
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
            the targets' variance).

        Raises:
            TrainingError: loss or gradient is not finite; the weights are those before the failed update.
        """
        started = time.perf_counter()
        if self.needs_start and self._start is None:
            self.set_start()
        version, rate = self.version, self._optimiser.rate
        selections = select_groups(groups, self.algorithm, version=version)
        parts = _split_evenly(selections, self.config.updates_per_step)
        minis = [mini for part in parts if (mini := self._mini_batch(part)) is not None]
        sums = _Sums()
        prepared = self._prepare(minis, sums, measure_start=measure_start)
        for _ in range(self.config.epochs):
            for micros in prepared:
                self._apply(micros, sums)
        return {
            **self._learnt(sums),
            "learning_rate": rate,
            **_advantage_row([micro.batch.advantage_N for micros in prepared for micro in micros]),
            **_age_row(selections, version),
            **_batch_row(minis, selections),
            "updates": sums.values["updates"],
            "seconds": time.perf_counter() - started,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything for an exact resume but the start of RL: weights, optimiser, schedule, random state."""
        return {
            "model": self.model.state_dict(),
            **({} if self._values is None else {"values": self._values.state_dict()}),
            "optimiser": self._optimiser.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state; the weights are copied into the module in place."""
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
            device=next(self.model.parameters()).device,
            packed=self.config.packing == "packed",
        )

    @torch.no_grad()
    def _prepare(self, minis: Sequence[MiniBatch], sums: _Sums, *, measure_start: bool) -> list[list[_Prepared]]:
        """Old log-probs, importance weights, values and the start's log-probs, all before the first update."""
        algorithm = self.algorithm
        updates = len(minis) * self.config.epochs
        own = algorithm.old_logprobs == "learner" and algorithm.ratio != "none" and updates > 1
        start = self._start_scorer() if algorithm.kl_coefficient > 0 or measure_start else None
        prepared = []
        for mini in minis:
            actions = 0
            micros = []
            for batch, denominator_N in zip(mini.batches, mini.denominators, strict=True):
                made = _Prepared(batch, denominator_N)
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
            prepared.append([_shared(micro, actions) for micro in micros])
        return _whiten(prepared) if algorithm.whiten else prepared

    def _with_old(self, made: _Prepared, logp_N: Tensor, sums: _Sums, *, keep: bool) -> _Prepared:
        batch, algorithm = made.batch, self.algorithm
        cap, floor = algorithm.importance_cap, algorithm.importance_floor
        weight_N = importance_weights(
            logp_N, batch.sampler_logp_N, batch.row_N, kind=algorithm.importance, cap=cap, floor=floor
        )
        if weight_N is not None:
            outside_N = (weight_N >= cap) | (weight_N <= floor)
            sums.add(importance=float(weight_N.sum()), importance_bound=float(outside_N.sum()), weighed=len(weight_N))
        return replace(made, old_logp_N=logp_N if keep else None, weight_N=weight_N)

    def _with_values(self, made: _Prepared, value_N: Tensor) -> _Prepared:
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

    def _start_scorer(self) -> TokenScorer:
        if self._start is None:
            self.set_start()
        assert self._start is not None
        return self._start

    def _apply(self, micros: Sequence[_Prepared], sums: _Sums) -> None:
        for micro in micros:
            loss = self._loss(micro, sums)
            value = float(loss.detach())
            if not math.isfinite(value):
                self._optimiser.clear()
                raise TrainingError(
                    f"the loss of update {self.version + 1} is {value}; the weights are unchanged: resume from the "
                    "last checkpoint with a lower training.learning_rate, and check the sampler's log-probs if it "
                    "recurs"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            sums.add(loss=value)
        sums.add(grad_norm=self._optimiser.step(), updates=1)

    def _loss(self, micro: _Prepared, sums: _Sums) -> Tensor:
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
            sums.add(value_loss=float(error.detach()), **_moments(scores.value_N.detach(), micro.target_N))
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

    def _policy_loss(self, micro: _Prepared, logp_N: Tensor) -> PolicyLoss:
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

    def _learnt(self, sums: _Sums) -> dict[str, float]:
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
            row["value_explained"] = _explained(sums)
        return row


def make_mini_batch(
    trajectories_samples: Sequence[Sequence[TrainingSample]],
    *,
    normalisation: str,
    trajectories: int,
    length: int,
    budget: int,
    device: torch.device,
    packed: bool = False,
) -> MiniBatch:
    """Cut samples into micro-batches; the denominators are those of all of them together.

    Args:
        trajectories_samples: the samples of each trajectory; at least one of them has a trained token. Those without
            are left out.
        normalisation: a key of `DENOMINATORS`.
        trajectories: of the mini-batch before filtering.
        length: the constant length.
        budget: tokens of a micro-batch, padding included.
        device: where the micro-batches go.
        packed: samples stand end to end in a row instead of one a row.
    """
    kept = [[sample for sample in samples if sample.trained] for samples in trajectories_samples]
    kept = [samples for samples in kept if samples]
    trained = [sum(sample.trained for sample in samples) for samples in kept]
    of_trajectory = DENOMINATORS[normalisation](trained, trajectories=trajectories, length=length)
    denominators = torch.tensor([of_trajectory[owner] for owner, samples in enumerate(kept) for _ in samples])
    samples = [sample for samples in kept for sample in samples]
    lengths = [sample.length for sample in samples]
    split = split_by_tokens(lengths, budget, packed=packed)
    batches = [collate([samples[index] for index in indices], packed=packed) for indices in split]
    return MiniBatch(
        batches=[batch.to(device) for batch in batches],
        denominators=[
            denominators[indices][batch.row_N].to(device) for indices, batch in zip(split, batches, strict=True)
        ],
        samples=len(samples),
        tokens=sum(lengths),
        trained_tokens=sum(trained),
        padding_share=0.0 if packed else padding_share(lengths, split),
    )


def _shared(micro: _Prepared, actions: int) -> _Prepared:
    """The weight of each action in the value loss, so that all of a mini-batch add up to 1."""
    return micro if micro.action_N is None else replace(micro, action_N=micro.action_N / actions)


def _whiten(prepared: Sequence[Sequence[_Prepared]]) -> list[list[_Prepared]]:
    """The advantages of all trained tokens of a batch at mean 0 and deviation 1."""
    held = [micro.batch.advantage_N for micros in prepared for micro in micros]
    values = iter(whitened([value for advantage_N in held for value in advantage_N.tolist()]))
    made: list[list[_Prepared]] = []
    for micros in prepared:
        made.append([])
        for micro in micros:
            old_N = micro.batch.advantage_N
            new_N = torch.tensor([next(values) for _ in range(len(old_N))], dtype=old_N.dtype, device=old_N.device)
            made[-1].append(replace(micro, batch=replace(micro.batch, advantage_N=new_N)))
    return made


def _moments(value_N: Tensor, target_N: Tensor) -> dict[str, float]:
    """Sums for the explained variance of the values."""
    wide_N, error_N = target_N.double(), (target_N - value_N).double()
    return {
        "targets": float(wide_N.sum()),
        "targets_squared": float((wide_N**2).sum()),
        "errors": float(error_N.sum()),
        "errors_squared": float((error_N**2).sum()),
        "valued": float(len(target_N)),
    }


def _explained(sums: _Sums) -> float:
    """1 - Var(target - value) / Var(target); 0 where the targets are all equal."""
    spread = sums.mean("targets_squared", "valued") - sums.mean("targets", "valued") ** 2
    left = sums.mean("errors_squared", "valued") - sums.mean("errors", "valued") ** 2
    return 1.0 - left / spread if spread > 1e-12 else 0.0


def _advantage_row(advantages: Sequence[Tensor]) -> dict[str, float]:
    """Mean, deviation, least and largest over trained tokens; zeros where there are none."""
    names = ("advantage_mean", "advantage_std", "advantage_min", "advantage_max")
    if not advantages:
        return dict.fromkeys(names, 0.0)
    all_N = torch.cat([advantage_N.double() for advantage_N in advantages])
    mean, std = float(all_N.mean()), float(all_N.std(correction=0))
    return dict(zip(names, (mean, std, float(all_N.min()), float(all_N.max())), strict=True))


def _age_row(selections: Sequence[Selection], version: int) -> dict[str, float]:
    """Updates between sampling and training, over the trained trajectories; zeros where there are none."""
    ages = [age(scored.trajectory, version) for selection in selections for scored in selection.scored]
    return {"age_mean": sum(ages) / len(ages) if ages else 0.0, "age_max": float(max(ages, default=0))}


def _batch_row(minis: Sequence[MiniBatch], selections: Sequence[Selection]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for selection in selections:
        counts.update(selection.counts)
    tokens = sum(mini.tokens for mini in minis)
    computed = sum(mini.tokens / (1.0 - mini.padding_share) for mini in minis)
    kinds = ("total", "trained", "masked", "ungraded", "stale", "canary", "uniform", "lonely")
    return {
        "tokens": float(tokens),
        "trained_tokens": float(sum(mini.trained_tokens for mini in minis)),
        "padding_share": 1.0 - tokens / computed if computed else 0.0,
        "groups": float(len(selections)),
        "groups_uniform": float(sum(selection.uniform for selection in selections)),
        "groups_informative": float(sum(selection.informative for selection in selections)),
        **{f"trajectories_{kind}": float(counts[kind]) for kind in kinds},
    }


def _split_evenly(selections: Sequence[Selection], parts: int) -> list[Sequence[Selection]]:
    """Contiguous parts whose sizes differ by at most one; whole groups."""
    bounds = [len(selections) * part // parts for part in range(parts + 1)]
    return [selections[start:end] for start, end in pairwise(bounds)]
