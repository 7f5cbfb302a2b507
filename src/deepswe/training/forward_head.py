"""Log-probs and entropies straight from hidden states and the output matrix, in memory that no vocabulary sets.

The logits of N tokens are N x V numbers: 18 GiB for 32,000 tokens and the 151,936 entries of Qwen3, several times over
with their softmax and its gradient. Here they exist a few rows at a time. The forward pass keeps two numbers a token;
the backward pass makes the logits of each chunk again and has the gradient in closed form,

    d logp / d logits = (onehot(target) - softmax) / temperature,

so it costs one product of matrices more than autograd would (four in place of three). Where one chunk holds all, its
softmax is kept, and that product is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Chunks = Callable[[int, int], Iterable[int]]
"""(tokens, rows of a chunk) -> where each chunk begins that is computed."""


def every_chunk(count: int, rows: int) -> Iterable[int]:
    """All of them."""
    return range(0, count, rows)


def is_plain(head: nn.Module) -> bool:
    """Whether a head is a matrix and nothing else, so that its gradient is known in closed form."""
    return type(head) is nn.Linear and head.bias is None and not head._forward_hooks and not head._forward_pre_hooks


def score_by_head(
    head: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    rows: int,
    chunks: Chunks = every_chunk,
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets with gradient, entropies in nats without), both at least in float32.

    Args:
        head: a plain one; see `is_plain`.
        hidden_NH: the hidden states under the logits; under autocast, the products are in its type.
        targets_N: ids.
        temperature: the logits are divided by it.
        rows: logits of at most so many tokens exist at once.
        chunks: which are computed; others than all only where memory is counted, not numbers.
    """
    weight_VH = head.weight
    assert isinstance(weight_VH, Tensor)
    kind = hidden_NH.device.type
    narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VH.dtype
    logp_N, entropy_N = _Score.apply(hidden_NH, weight_VH, targets_N, temperature, rows, narrow, chunks)  # type: ignore[no-untyped-call]
    return logp_N, entropy_N


class _Score(torch.autograd.Function):
    """The function above; its gradient goes to the hidden states and to the matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature: float,
        rows: int,
        narrow: torch.dtype,
        chunks: Chunks,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if narrow == torch.float64 else torch.float32
        count = len(targets_N)
        logp_N = torch.empty(count, dtype=wide, device=hidden_NH.device)
        entropy_N, top_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
        matrix_VH, kept_NV = weight_VH.to(narrow), None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            if count <= rows:
                all_NV = _logits(hidden_NH, matrix_VH, temperature, wide).log_softmax(-1)
                logp_N, kept_NV = all_NV.gather(1, targets_N[:, None])[:, 0], all_NV.exp()
                entropy_N = _entropy(kept_NV, all_NV)
            else:
                for first in chunks(count, rows):
                    part = slice(first, min(first + rows, count))
                    logits_RV = _logits(hidden_NH[part], matrix_VH, temperature, wide)
                    top_N[part] = logits_RV.logsumexp(-1)
                    logp_N[part] = logits_RV.gather(1, targets_N[part, None])[:, 0] - top_N[part]
                    logp_RV = logits_RV.sub_(top_N[part, None])
                    entropy_N[part] = _entropy(logp_RV.exp(), logp_RV)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, top_N, kept_NV)
        ctx.settings = (temperature, rows, narrow, wide, chunks)
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, by_logp_N: Tensor, by_entropy_N: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden_NH, weight_VH, targets_N, top_N, kept_NV = ctx.saved_tensors
        temperature, rows, narrow, wide, chunks = ctx.settings
        matrix_VH = weight_VH.to(narrow)
        by_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        by_weight_VH = (
            torch.zeros(weight_VH.shape, dtype=wide, device=weight_VH.device) if ctx.needs_input_grad[1] else None
        )
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for first in chunks(len(targets_N), rows):
                part = slice(first, min(first + rows, len(targets_N)))
                by_R1 = (by_logp_N[part] / temperature)[:, None]
                if kept_NV is not None:
                    by_RV = kept_NV * -by_R1
                else:
                    by_RV = _logits(hidden_NH[part], matrix_VH, temperature, wide)
                    by_RV.sub_(top_N[part, None]).exp_().mul_(-by_R1)
                by_RV.scatter_add_(1, targets_N[part, None], by_R1)
                narrow_RV = by_RV.to(narrow)
                if by_hidden_NH is not None:
                    by_hidden_NH[part] = (narrow_RV @ matrix_VH).to(hidden_NH.dtype)
                if by_weight_VH is not None:
                    _add_product(by_weight_VH, narrow_RV, hidden_NH[part].to(narrow))
        given = None if by_weight_VH is None else by_weight_VH.to(weight_VH.dtype)
        return by_hidden_NH, given, None, None, None, None, None


def _logits(hidden_RH: Tensor, matrix_VH: Tensor, temperature: float, wide: torch.dtype) -> Tensor:
    """At the temperature; the caller may change them in place."""
    logits_RV = (hidden_RH.to(matrix_VH.dtype) @ matrix_VH.T).to(wide)
    return logits_RV if temperature == 1.0 else logits_RV.div_(temperature)


def _entropy(share_RV: Tensor, logp_RV: Tensor) -> Tensor:
    """- sum of p log p; log p is used up."""
    # Where p is 0, log p may be minus infinity, and the product of the two no number.
    entropy_R: Tensor = torch.linalg.vecdot(share_RV, logp_RV.clamp_(min=-1e4)).neg_()
    return entropy_R


def _add_product(total_VH: Tensor, by_RV: Tensor, hidden_RH: Tensor) -> None:
    """total += by^T hidden, in the type of the total where the two are narrower."""
    if by_RV.dtype == total_VH.dtype:
        total_VH.addmm_(by_RV.T, hidden_RH)
    else:
        total_VH.add_(by_RV.T @ hidden_RH)
