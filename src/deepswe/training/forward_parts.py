"""Attention along the branches of a row on a CPU, each part of it by the flash kernel, put together exactly.

What a query gathers from some of its keys is a mean with weights whose sum the kernel gives with it, as its logarithm;
so the means over all parts, weighed by these sums, are the mean over all keys (Dao et al. 2022, arXiv 2205.14135,
section 3.1). In the backward pass each part needs what was gathered from all keys, and the sum over all.

A part has either every key for every query, or is plainly causal: no mask is made, no key is copied, and what is hidden
is hardly computed. Queries of neighbouring branches that see the same stretch of keys are one part, and parts alike
that follow each other are one call of the kernel.

Shapes: H heads, T tokens in the row, D head size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepswe.algorithms.packing import Branch, Stretch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

SHORT = 1024
"""A causal part with fewer tokens is cut: the kernel computes blocks of 512 keys whole."""
CUT = 192
"""Tokens of each piece of it, about."""


class Part(NamedTuple):
    """Queries and the keys that they see: all of them, or (causal, where both are one stretch) those up to each.

    Attributes:
        queries, keys: of several parts alike, those of the first.
        mask: where queries are not all of a stretch, 0 for each key up to each of them and minus infinity behind, as
            (times, 1, queries, keys).
        times: how many parts alike these are.
        apart: how far after those of the one before the queries and the keys of each begin.
    """

    queries: Stretch
    keys: Stretch
    causal: bool
    mask: Tensor | None = None
    times: int = 1
    apart: tuple[int, int] = (0, 0)

    @property
    def own(self) -> bool:
        """Whether the queries are among the keys."""
        return self.causal or self.mask is not None


def parts_of(branches: Sequence[Branch]) -> list[Part]:
    """The parts of the attention of a row, each query's own piece first."""
    return _together(_each(branches, SHORT))


def _each(branches: Sequence[Branch], short: float) -> list[Part]:
    """The parts one by one; a causal one with fewer tokens than `short` is cut."""
    own = [part for branch in branches for part in _within(branch.own, short)]
    seen: dict[Stretch, list[Stretch]] = {}
    for branch in branches:
        for keys in branch.before:
            those = seen.setdefault(keys, [])
            if those and those[-1][1] == branch.own[0]:
                those[-1] = (those[-1][0], branch.own[1])
            else:
                those.append(branch.own)
    own.sort(key=lambda part: not part.causal)
    return own + [Part(queries, keys, False) for keys, those in seen.items() for queries in those]


def thinned(branches: Sequence[Branch], kept_R: Tensor, kind: torch.dtype) -> list[Part]:
    """The parts of the attention of some tokens of a row, who stand end to end as queries.

    Args:
        branches: of the row.
        kept_R: the places of the queries, rising.
        kind: the type of the masks.
    """
    kept = kept_R.tolist()
    made = []
    for part in _each(branches, math.inf):
        queries, keys, causal = part.queries, part.keys, part.causal
        first, last = bisect_left(kept, queries[0]), bisect_left(kept, queries[1])
        if first == last:
            continue
        mask = None
        if causal:
            keys = (keys[0], kept[last - 1] + 1)
            causal = last - first == keys[1] - keys[0]
            if not causal:
                behind = torch.arange(*keys) > kept_R[first:last, None]
                mask = torch.zeros(1, 1, *behind.shape, dtype=kind).masked_fill_(behind, -math.inf)
        made.append(Part((first, last), keys, causal, mask))
    return _together(made)


def _together(parts: Sequence[Part]) -> list[Part]:
    """The same, where parts alike that follow each other at equal distances are one."""
    made: list[Part] = []
    for part in parts:
        longer = _with(made[-1], part) if made else None
        if longer is None:
            made.append(part)
        else:
            made[-1] = longer
    return made


def _with(parts: Part, part: Part) -> Part | None:
    """These and one more; None where it is not alike. Only those with queries among their keys share no place."""
    if not (parts.own and part.own) or _kind(parts) != _kind(part):
        return None
    apart = parts.apart if parts.times > 1 else (part.queries[0] - parts.queries[0], part.keys[0] - parts.keys[0])
    at = (part.queries[0] - parts.times * apart[0], part.keys[0] - parts.times * apart[1])
    if at != (parts.queries[0], parts.keys[0]):
        return None
    mask = None if parts.mask is None or part.mask is None else torch.cat((parts.mask, part.mask))
    return parts._replace(mask=mask, times=parts.times + 1, apart=apart)


def _kind(part: Part) -> tuple[bool, int, int]:
    return part.causal, part.queries[1] - part.queries[0], part.keys[1] - part.keys[0]


def _within(own: Stretch, short: float) -> list[Part]:
    """The parts of a stretch's attention on itself."""
    start, end = own
    count = max(1, round((end - start) / CUT)) if end - start < short else 1
    places = [*(start + CUT * number for number in range(count)), end]
    return [
        part
        for piece in pairwise(places)
        for part in (Part(piece, piece, True), *([Part(piece, (start, piece[0]), False)] if piece[0] > start else []))
    ]


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], *, scaling: float | None
) -> Tensor:
    """What the queries (1, H, T, D) gather; keys and values have as many heads or, of groups of heads, fewer.

    Args:
        parts: as `parts_of` makes them: the first part of each query has it among its keys.
        scaling: of the products; None is that of the head size.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    made: Tensor = _Attention.apply(query, key, value, parts, scale)  # type: ignore[no-untyped-call]
    return made


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float) -> Tensor:
        made_HTD, total_HT = attend(query, key, value, parts, scale)
        ctx.save_for_backward(query, key, value, made_HTD, total_HT)
        ctx.parts, ctx.scale = parts, scale
        return made_HTD

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, made_HTD, total_HT = ctx.saved_tensors
        found = attend_backward(gradient, query, key, value, made_HTD, total_HT, ctx.parts, ctx.scale)
        return (*found, None, None)


def attend(query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float) -> tuple[Tensor, Tensor]:
    """(what the queries gather, the logarithms of the sums of their weights)."""
    made_HTD = torch.empty_like(query)
    total_HT = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for part in parts:
        gathered, total = _forward(
            _queries(query, part),
            _keys(key, part),
            _keys(value, part),
            0.0,
            part.causal,
            attn_mask=part.mask,
            scale=scale,
        )
        made, sums = _queries(made_HTD, part), _queries(total_HT, part)
        if part.own:
            made.copy_(gathered)
            sums.copy_(total)
        else:
            _add(made, sums, gathered, total)
    return made_HTD, total_HT


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    made_HTD: Tensor,
    total_HT: Tensor,
    parts: Sequence[Part],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from that of what was gathered."""
    for_query = torch.empty_like(query, dtype=total_HT.dtype)
    for_key, for_value = (torch.zeros_like(states, dtype=total_HT.dtype) for states in (key, value))
    gradient = gradient.contiguous() if gradient.stride(-1) != 1 else gradient
    for part in parts:
        by_query, by_key, by_value = _backward(
            _queries(gradient, part),
            _queries(query, part),
            _keys(key, part),
            _keys(value, part),
            _queries(made_HTD, part),
            _queries(total_HT, part),
            0.0,
            part.causal,
            attn_mask=part.mask,
            scale=scale,
        )
        if part.own:
            _queries(for_query, part).copy_(by_query)
        else:
            _queries(for_query, part).add_(by_query)
        _keys(for_key, part).add_(by_key)
        _keys(for_value, part).add_(by_value)
    kind = query.dtype
    return for_query.to(kind), for_key.to(kind), for_value.to(kind)


def _add(made: Tensor, total: Tensor, gathered: Tensor, more: Tensor) -> None:
    """Add what was gathered from more keys, in place: means and the logarithms of the sums of their weights."""
    both = torch.logaddexp(total, more)
    made.mul_((total - both).exp_().unsqueeze(-1)).add_(gathered.mul_((more - both).exp_().unsqueeze(-1)))
    total.copy_(both)


def _queries(states: Tensor, part: Part) -> Tensor:
    """Those of a part, of states (1, H, T, ...)."""
    return _stretches(states, part.queries, part.times, part.apart[0])


def _keys(states: Tensor, part: Part) -> Tensor:
    return _stretches(states, part.keys, part.times, part.apart[1])


def _stretches(states: Tensor, first: Stretch, times: int, apart: int) -> Tensor:
    """Stretches (times, H, count, ...) of (1, H, T, ...), in place."""
    start, end = first
    if times == 1:
        return states.narrow(2, start, end - start)
    whole = states[0].narrow(1, start, end - start + (times - 1) * apart)
    return whole.unfold(1, end - start, apart).movedim(-1, 2).transpose(0, 1)
