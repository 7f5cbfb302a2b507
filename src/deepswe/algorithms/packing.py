"""Packing: trajectories -> training samples -> micro-batches under a token budget.

Padded: samples are sorted by length and padded on the right. With causal attention a token never looks at what is right
of it, so padding needs no mask, and attention takes its fast path.

Packed: samples stand end to end in one row whose positions start anew with each, and attention goes along each alone.
No token is padding, so it pays where lengths differ much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepswe.algorithms.filters import turns
from deepswe.errors import TrainingError
from deepswe.types import TokenSpan, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One token sequence of a trajectory as tensors of its own length L. Most trajectories have one.

    Attributes:
        tokens_L: ids, int64.
        mask_L: bool; the tokens in the loss. Never the first, which nothing predicts.
        sampler_logp_L: float32 log-probs of the sampler, 0 where not sampled.
        advantage_L: float32; 0 where not in the loss.
        turn_L: int64, the turn of each token in the loss; -1 elsewhere.
    """

    tokens_L: Tensor
    mask_L: Tensor
    sampler_logp_L: Tensor
    advantage_L: Tensor
    turn_L: Tensor

    @property
    def length(self) -> int:
        """Tokens."""
        return self.tokens_L.shape[0]

    @property
    def trained(self) -> int:
        """Tokens in the loss."""
        return int(self.mask_L.sum())


def make_samples(
    trajectory: Trajectory, advantages: Sequence[float] = (), *, all_tokens: bool = False
) -> tuple[TrainingSample, ...]:
    """The sequences of a trajectory as samples: exactly the tokens that the engine saw, cut after the last trained one.

    Args:
        trajectory: at least one token.
        advantages: one a turn; none is 0 for each.
        all_tokens: put every token into the loss, not only the sampled ones (language modelling).

    Raises:
        TrainingError: a remote endpoint made it, so that its stream is text and no model's tokens.
    """
    if trajectory.usage:
        raise TrainingError(
            f"attempt {trajectory.attempt} at {trajectory.task_id} was made by a remote endpoint: its stream is text, "
            "not the tokens of a model, and cannot be trained; imitate it with imitation.source = 'text'"
        )
    samples, first = [], 0
    for spans in trajectory.sequences:
        numbers = [turn + first if turn >= 0 else -1 for turn in turns(spans)]
        first = max([first, *(turn + 1 for turn in numbers)])
        samples.append(_make_sample(spans, numbers, advantages, all_tokens))
    return tuple(samples)


def _make_sample(
    spans: Sequence[TokenSpan], numbers: Sequence[int], advantages: Sequence[float], all_tokens: bool
) -> TrainingSample:
    counts = [len(span.tokens) for span in spans]
    sampled = np.array([span.sampled for span in spans])
    logp_L = np.zeros(sum(counts), dtype=np.float32)
    logprobs = [span.logprobs for span in spans if span.sampled]
    logp_L[np.repeat(sampled, counts)] = np.fromiter(chain.from_iterable(logprobs), np.float32, sum(map(len, logprobs)))
    worth = [advantages[turn] if advantages and turn >= 0 else 0.0 for turn in numbers]
    tokens_L = np.fromiter(chain.from_iterable(span.tokens for span in spans), np.int64, len(logp_L))
    mask_L = np.repeat(sampled | all_tokens, counts)
    advantage_L = np.repeat(np.array(worth, dtype=np.float32), counts)
    turn_L = np.repeat(np.array(numbers, dtype=np.int64), counts)
    mask_L[:1], advantage_L[:1], turn_L[:1] = False, 0.0, -1
    trained = mask_L.nonzero()[0]
    end = int(trained[-1]) + 1 if len(trained) else len(mask_L)
    return TrainingSample(*(torch.from_numpy(of_L[:end]) for of_L in (tokens_L, mask_L, logp_L, advantage_L, turn_L)))


Stretch = tuple[int, int]
"""Places of a row, from and to (without the last)."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A stretch of a row that attention goes along: the tokens of one sample, or its new ones in a prefix tree.

    Attributes:
        own: where they stand.
        before: the stretches of the row, in order, that hold the tokens before them; without gaps they are one.
    """

    own: Stretch
    before: tuple[Stretch, ...]

    @property
    def depth(self) -> int:
        """Tokens before."""
        return sum(end - start for start, end in self.before)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows of T tokens, and their N trained tokens in row order.

    Attributes:
        tokens_BT: ids; 0 where padded.
        mask_BT: bool; tokens in the loss.
        sampler_logp_N, advantage_N: of each trained token.
        row_N: the sample of each trained token, in the order in which they were collated.
        turn_N: its turn.
        position_BT: positions, which start anew with each sample of a packed row; None where each row is one sample.
        target_N, from_N, branches: of a row of many samples, packed or a prefix tree (`deepswe.algorithms.prefix`), the
            trained tokens, the place whose state predicts each, and what each stretch comes after; of a tree `mask_BT`
            says nothing.
    """

    tokens_BT: Tensor
    mask_BT: Tensor
    sampler_logp_N: Tensor
    advantage_N: Tensor
    row_N: Tensor
    turn_N: Tensor
    position_BT: Tensor | None = None
    target_N: Tensor | None = None
    from_N: Tensor | None = None
    branches: tuple[Branch, ...] | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        held = {item.name: getattr(self, item.name) for item in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in held.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def split_by_tokens(lengths: Sequence[int], budget: int, *, packed: bool = False, multiple: int = 1) -> list[list[int]]:
    """Partition the indices of `lengths` into micro-batches, longest first, of at most `budget` tokens.

    Padded, these are rows x longest. Packed, they are the sum; each sample goes into the first row with room for it.
    A sample longer than the budget gets a micro-batch of its own.

    Args:
        lengths: tokens of each sample.
        budget: most tokens of a micro-batch, padding included.
        packed: how they will be collated.
        multiple: their number is a multiple of it where there are samples enough: the costliest are halved, so that
            as many processes have the same number each.
    """
    batches = _first_fit(lengths, budget) if packed else _padded(lengths, budget)
    return halved(batches, lengths, multiple, packed=packed)


def _padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def halved(batches: list[list[int]], lengths: Sequence[int], multiple: int, *, packed: bool = False) -> list[list[int]]:
    """The same samples in more micro-batches, until their number is a multiple or none can be divided."""

    def cost(batch: Sequence[int]) -> int:
        if len(batch) < 2:
            return 0
        return sum(lengths[index] for index in batch) if packed else len(batch) * lengths[batch[0]]

    while len(batches) % multiple:
        place = max(range(len(batches)), key=lambda at: cost(batches[at]))
        batch = batches[place]
        if len(batch) < 2:
            break
        middle = len(batch) // 2
        halves = [batch[0::2], batch[1::2]] if packed else [batch[:middle], batch[middle:]]
        batches = [*batches[:place], *halves, *batches[place + 1 :]]
    return batches


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = next((at for at, left in enumerate(room) if lengths[index] <= left), None)
        if place is None:
            batches.append([index])
            room.append(budget - lengths[index])
        else:
            batches[place].append(index)
            room[place] -= lengths[index]
    return batches


def collate(samples: Sequence[TrainingSample], *, packed: bool = False) -> MicroBatch:
    """Samples as one micro-batch, padded on the right or, if `packed`, end to end in one row.

    Args:
        samples: at least one.
        packed: which of the two.
    """
    row = EndToEnd(samples)
    if not packed:
        return MicroBatch(
            tokens_BT=pad_sequence([sample.tokens_L for sample in samples], batch_first=True),
            mask_BT=pad_sequence([sample.mask_L for sample in samples], batch_first=True),
            **row.trained(),
        )
    return MicroBatch(
        tokens_BT=row.tokens_T[None],
        mask_BT=row.mask_T[None],
        **row.trained(),
        position_BT=row.position_T[None],
        target_N=row.tokens_T[row.trained_N],
        from_N=row.trained_N - 1,
        branches=tuple(Branch(own, ()) for own in pairwise(row.ends)),
    )


class Trained(TypedDict):
    """What a micro-batch has of each trained token."""

    sampler_logp_N: Tensor
    advantage_N: Tensor
    row_N: Tensor
    turn_N: Tensor


class EndToEnd:
    """Samples one after another: T tokens, N of them trained.

    Attributes:
        tokens_T, mask_T: as in the samples.
        position_T: the place of each in its sample.
        trained_N: the places of the trained ones.
        ends: where the samples begin, and the last one ends.
    """

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self._samples = samples
        lengths = torch.tensor([sample.length for sample in samples])
        self.ends = list(accumulate(lengths.tolist(), initial=0))
        self.tokens_T, self.mask_T = self._whole("tokens_L"), self._whole("mask_L")
        self.position_T = torch.arange(self.ends[-1]) - torch.tensor(self.ends[:-1]).repeat_interleave(lengths)
        self.trained_N = self.mask_T.nonzero()[:, 0]
        self._sample_T = torch.arange(len(samples)).repeat_interleave(lengths)

    def trained(self) -> Trained:
        """Of each trained token."""
        return Trained(
            sampler_logp_N=self._whole("sampler_logp_L")[self.trained_N],
            advantage_N=self._whole("advantage_L")[self.trained_N],
            row_N=self._sample_T[self.trained_N],
            turn_N=self._whole("turn_L")[self.trained_N],
        )

    def _whole(self, name: str) -> Tensor:
        return torch.cat([getattr(sample, name) for sample in self._samples])


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of the computed tokens that are padding, if padded; 0 for no batches."""
    computed = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    return 1.0 - sum(lengths[index] for batch in batches for index in batch) / computed if computed else 0.0
