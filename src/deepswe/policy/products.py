"""The linear maps of the embedded engine, prepared once for each state of the weights.

The learner changes its weights once a step, and the engine reads them thousands of times between, for few tokens at a
time: so it keeps a copy that is made for that. Maps of the same states are one product. Matrices are in the type that a
pass is computed in, and on a CPU laid out in blocks by oneDNN, where that pays: a product of few rows would spend most
of its time on doing so anew. In bfloat16, with the matrix units of a CPU that has them, products take a quarter of the
time that they take in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_PACKED_FROM = {torch.float32: 1 << 20, torch.bfloat16: 1 << 12}
"""Entries of a matrix from which blocks pay, for 1 to 512 rows of states."""


class Product:
    """states (T, K) -> (T, M): several linear maps, whose results stand side by side."""

    def __init__(self, maps: Sequence[nn.Linear], kind: torch.dtype) -> None:
        """Args:
        maps: of as many inputs each; their weights are taken as they are now.
        kind: type of the products and of their results.
        """
        weights: list[Tensor] = [of.weight.detach() for of in maps]
        whole_MK = (torch.cat(weights) if len(weights) > 1 else weights[0]).to(kind)
        self._kind = kind
        self._packed = whole_MK.numel() >= _PACKED_FROM.get(kind, 1 << 62) and _packs(whole_MK)
        self._weight_MK = torch.ops.mkldnn._reorder_linear_weight(whole_MK, None) if self._packed else whole_MK
        self._bias_M: Tensor | None = None
        if any(of.bias is not None for of in maps):
            biases: list[Tensor] = [of.weight.new_zeros(len(of.weight)) if of.bias is None else of.bias for of in maps]
            self._bias_M = torch.cat(biases).detach().to(kind)

    def __call__(self, states_TK: Tensor) -> Tensor:
        """The product, in its type."""
        states_TK = states_TK.to(self._kind)
        if self._packed:
            made_TM: Tensor = torch.ops.mkldnn._linear_pointwise(
                states_TK, self._weight_MK, self._bias_M, "none", [], ""
            )
            return made_TM
        return linear(states_TK, self._weight_MK, self._bias_M)


def _packs(weight_MK: Tensor) -> bool:
    """Whether oneDNN lays out matrices like this one here."""
    return weight_MK.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
