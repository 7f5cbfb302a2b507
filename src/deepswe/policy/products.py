"""The linear maps of the embedded engine, prepared once for each state of the weights.

The learner changes its weights once a step, and the engine reads them thousands of times between, for few tokens at a
time: so it keeps a copy that is made for that. Maps of the same states are one product. Matrices are in the type that a
pass is computed in. On a CPU, where a product of few rows would spend much of its time on laying them out anew, they
are transposed, with which 8 to 64 rows take a half to nine tenths of the time. Large ones are in pieces that stay in a
core's cache where one thread computes, and else in oneDNN's blocks. In bfloat16 all but the smallest are in blocks,
with which the matrix units of a CPU that has them take a quarter of the time that float32 takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_LARGE = {torch.float32: 1 << 20, torch.bfloat16: 1 << 12}
"""Entries of a matrix from which oneDNN's blocks pay, for 1 to 512 rows of states."""
_PIECE = 384
"""Outputs of a piece, about; fewer than a thousand are not cut."""


class Product:
    """states (T, K) -> (T, M): several linear maps, whose results stand side by side."""

    def __init__(self, maps: Sequence[nn.Linear], kind: torch.dtype) -> None:
        """Args:
        maps: of as many inputs each; their weights are taken as they are now.
        kind: type of the products and of their results.

        The calling thread is the one that computes them: how they are laid out goes by its threads.
        """
        weights: list[Tensor] = [of.weight.detach() for of in maps]
        whole_MK = (torch.cat(weights) if len(weights) > 1 else weights[0]).to(kind)
        self._kind = kind
        self._bias_M: Tensor | None = None
        if any(of.bias is not None for of in maps):
            biases: list[Tensor] = [of.weight.new_zeros(len(of.weight)) if of.bias is None else of.bias for of in maps]
            self._bias_M = torch.cat(biases).detach().to(kind)
        self._blocks: Tensor | None = None
        self._pieces: list[Tensor] = []
        on_cpu, alone = whole_MK.device.type == "cpu", torch.get_num_threads() == 1
        large = whole_MK.numel() >= _LARGE.get(kind, 1 << 62)
        if on_cpu and large and not (alone and kind == torch.float32) and _makes_blocks():
            self._blocks = torch.ops.mkldnn._reorder_linear_weight(whole_MK, None)
        elif on_cpu and kind == torch.float32:
            count = round(len(whole_MK) / _PIECE) if alone and len(whole_MK) >= 1000 else 1
            self._pieces = [_transposed(piece_MK) for piece_MK in whole_MK.tensor_split(count)]
        else:
            self._weight_MK = whole_MK

    def __call__(self, states_TK: Tensor) -> Tensor:
        """The product, in its type."""
        states_TK = states_TK.to(self._kind)
        if self._blocks is not None:
            made_TM: Tensor = torch.ops.mkldnn._linear_pointwise(states_TK, self._blocks, self._bias_M, "none", [], "")
            return made_TM
        if not self._pieces:
            return linear(states_TK, self._weight_MK, self._bias_M)
        made_TM = self._by_pieces(states_TK)
        return made_TM if self._bias_M is None else made_TM.add_(self._bias_M)

    def _by_pieces(self, states_TK: Tensor) -> Tensor:
        if len(self._pieces) == 1:
            return states_TK @ self._pieces[0]
        made_TM = states_TK.new_empty(len(states_TK), sum(piece_KM.shape[1] for piece_KM in self._pieces))
        first = 0
        for piece_KM in self._pieces:
            last = first + piece_KM.shape[1]
            torch.mm(states_TK, piece_KM, out=made_TM[:, first:last])
            first = last
        return made_TM


def _transposed(matrix_MK: Tensor) -> Tensor:
    """A copy (K, M)."""
    return matrix_MK.t().clone(memory_format=torch.contiguous_format)


def _makes_blocks() -> bool:
    """Whether oneDNN lays out matrices here."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
