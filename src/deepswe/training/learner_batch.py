"""The batch of an update: samples cut into micro-batches, with everything about them that an update does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from deepswe.algorithms.advantages import whitened
from deepswe.algorithms.losses import DENOMINATORS
from deepswe.algorithms.packing import (
    Branch,
    MicroBatch,
    TrainingSample,
    collate,
    padding_share,
    split_by_tokens,
)
from deepswe.algorithms.prefix import LEAST_SHARED, collate_tree, split_by_nodes

Packing = Literal["padded", "packed", "tree"]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The samples of one optimiser update, already cut into micro-batches.

    Attributes:
        batches: micro-batches, padded or packed.
        denominators: for each micro-batch, the denominator of each of its tokens; taken over all samples.
        samples, tokens, trained_tokens: in all, without padding.
        padding_share: of the computed tokens.
        computed: tokens that go through the model: with padding, and shared prefixes of a tree once.
    """

    batches: list[MicroBatch]
    denominators: list[Tensor]
    samples: int
    tokens: int
    trained_tokens: int
    padding_share: float
    computed: int


@dataclass(frozen=True, slots=True)
class Prepared:
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


def make_mini_batch(
    trajectories_samples: Sequence[Sequence[TrainingSample]],
    *,
    normalisation: str,
    trajectories: int,
    length: int,
    budget: int,
    device: torch.device,
    packing: Packing = "padded",
    multiple: int = 1,
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
        packing: one sample a row, padded; end to end in one row; or as a prefix tree, whose budget is in nodes.
        multiple: the number of micro-batches is a multiple of it where there are samples enough.
    """
    counted = [[(sample, sample.trained) for sample in samples] for samples in trajectories_samples]
    kept = [[pair for pair in pairs if pair[1]] for pairs in counted]
    kept = [pairs for pairs in kept if pairs]
    trained = [sum(count for _, count in pairs) for pairs in kept]
    of_trajectory = DENOMINATORS[normalisation](trained, trajectories=trajectories, length=length)
    denominators = torch.tensor([of_trajectory[owner] for owner, pairs in enumerate(kept) for _ in pairs])
    samples = [sample for pairs in kept for sample, _ in pairs]
    lengths = [sample.length for sample in samples]
    split, batches = _cut(samples, budget, packing, multiple)
    return MiniBatch(
        batches=[batch.to(device) for batch in batches],
        denominators=[
            denominators[indices][batch.row_N].to(device) for indices, batch in zip(split, batches, strict=True)
        ],
        samples=len(samples),
        tokens=sum(lengths),
        trained_tokens=sum(trained),
        padding_share=padding_share(lengths, split) if packing == "padded" else 0.0,
        computed=sum(batch.tokens_BT.numel() for batch in batches),
    )


def _cut(
    samples: Sequence[TrainingSample], budget: int, packing: Packing, multiple: int
) -> tuple[list[list[int]], list[MicroBatch]]:
    """(the indices of the samples of each micro-batch, the micro-batches)."""
    if packing == "tree":
        split = split_by_nodes([sample.tokens_L for sample in samples], budget, least=LEAST_SHARED, multiple=multiple)
        trees = [[samples[index] for index in indices] for indices in split]
        return split, [collate_tree(tree, least=LEAST_SHARED, walked=True) for tree in trees]
    packed = packing == "packed"
    split = split_by_tokens([sample.length for sample in samples], budget, packed=packed, multiple=multiple)
    return split, [collate([samples[index] for index in indices], packed=packed) for indices in split]


def emptied(pair: tuple[MicroBatch, Tensor]) -> tuple[MicroBatch, Tensor]:
    """A micro-batch of two tokens without a trained one, and its denominators: its gradients are 0."""
    batch, denominator_N = pair
    nothing = MicroBatch(
        tokens_BT=batch.tokens_BT[:1, :2],
        mask_BT=torch.zeros_like(batch.mask_BT[:1, :2]),
        sampler_logp_N=batch.sampler_logp_N[:0],
        advantage_N=batch.advantage_N[:0],
        row_N=batch.row_N[:0],
        turn_N=batch.turn_N[:0],
        position_BT=None if batch.position_BT is None else batch.position_BT[:, :2],
        target_N=None if batch.target_N is None else batch.target_N[:0],
        from_N=None if batch.from_N is None else batch.from_N[:0],
        branches=None if batch.branches is None else (Branch((0, batch.tokens_BT[:, :2].shape[1]), ()),),
    )
    return nothing, denominator_N[:0]


def share_actions(micro: Prepared, actions: int) -> Prepared:
    """The weight of each action in the value loss, so that all of a mini-batch add up to 1."""
    return micro if micro.action_N is None else replace(micro, action_N=micro.action_N / actions)


def whiten(prepared: Sequence[Sequence[Prepared]]) -> list[list[Prepared]]:
    """The advantages of all trained tokens of a batch at mean 0 and deviation 1."""
    held = [micro.batch.advantage_N for micros in prepared for micro in micros]
    values = iter(whitened([value for advantage_N in held for value in advantage_N.tolist()]))
    made: list[list[Prepared]] = []
    for micros in prepared:
        made.append([])
        for micro in micros:
            old_N = micro.batch.advantage_N
            new_N = torch.tensor([next(values) for _ in range(len(old_N))], dtype=old_N.dtype, device=old_N.device)
            made[-1].append(replace(micro, batch=replace(micro.batch, advantage_N=new_N)))
    return made
