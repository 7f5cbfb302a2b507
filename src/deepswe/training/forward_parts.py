"""Attention along the branches of a row on a CPU, each part of it by the flash kernel, put together exactly.

What a query gathers from some of its keys is a mean with weights whose sum the kernel gives with it, as its logarithm;
so the means over all parts, weighed by these sums, are the mean over all keys (Dao et al. 2022, arXiv 2205.14135,
section 3.1). In the backward pass each part needs what was gathered from all keys, and the sum over all.

A part has either every key for every query, or is plainly causal: no mask is made, no key is copied, and what is hidden
is hardly computed. Queries of neighbouring branches that see the same stretch of keys are one part.

Shapes: H heads, T tokens in the row, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepswe.algorithms.packing import Branch, Stretch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

SHORT = 1024
"""A causal part with fewer tokens is cut: the kernel computes blocks of 512 keys whole."""
CUT = 128
"""Tokens of each piece of it."""


class Part(NamedTuple):
    """Queries and the keys that they see: all of them, or (causal, where both are one stretch) those up to each."""

    queries: Stretch
    keys: Stretch
    causal: bool


def parts_of(branches: Sequence[Branch]) -> list[Part]:
    """The parts of the attention of a row, each query's own piece first."""
    own = [part for branch in branches for part in _within(branch.own)]
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


def _within(own: Stretch) -> list[Part]:
    """The parts of a stretch's attention on itself."""
    start, end = own
    step = CUT if CUT < end - start < SHORT else end - start
    pieces = [(at, min(at + step, end)) for at in range(start, end, step)]
    return [
        part
        for piece in pieces
        for part in (Part(piece, piece, True), *([Part(piece, (start, piece[0]), False)] if piece[0] > start else []))
    ]


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], *, scaling: float | None
) -> Tensor:
    """What the queries (1, H, T, D) gather; keys and values have as many heads.

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
        made_HTD = torch.empty_like(query)
        total_HT = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for part in parts:
            own, keys = _cut(part.queries), _cut(part.keys)
            gathered, total = _forward(query[own], key[keys], value[keys], 0.0, part.causal, scale=scale)
            if part.causal:
                made_HTD[own], total_HT[own] = gathered, total
            else:
                _add(made_HTD[own], total_HT[own], gathered, total)
        ctx.save_for_backward(query, key, value, made_HTD, total_HT)
        ctx.parts, ctx.scale = parts, scale
        return made_HTD

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, made_HTD, total_HT = ctx.saved_tensors
        for_query, for_key, for_value = (torch.zeros_like(s, dtype=total_HT.dtype) for s in (query, key, value))
        gradient = gradient.contiguous() if gradient.stride(-1) != 1 else gradient
        for part in ctx.parts:
            own, keys = _cut(part.queries), _cut(part.keys)
            found = _backward(
                gradient[own],
                query[own],
                key[keys],
                value[keys],
                made_HTD[own],
                total_HT[own],
                0.0,
                part.causal,
                scale=ctx.scale,
            )
            for_query[own] += found[0]
            for_key[keys] += found[1]
            for_value[keys] += found[2]
        kind = query.dtype
        return for_query.to(kind), for_key.to(kind), for_value.to(kind), None, None


def _add(made: Tensor, total: Tensor, gathered: Tensor, more: Tensor) -> None:
    """Add what was gathered from more keys, in place: means and the logarithms of the sums of their weights."""
    both = torch.logaddexp(total, more)
    made.mul_((total - both).exp_().unsqueeze(-1)).add_(gathered.mul_((more - both).exp_().unsqueeze(-1)))
    total.copy_(both)


def _cut(stretch: Stretch) -> tuple[slice, slice, slice]:
    return slice(None), slice(None), slice(*stretch)
