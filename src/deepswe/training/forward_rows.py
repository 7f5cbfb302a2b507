"""The forward pass over a row of many samples, end to end or as a prefix tree (`deepswe.algorithms.prefix`).

Attention goes along each branch and what is before it; a mask over the whole row would cost the square of its length.
Only attention knows of branches: all else in a decoder works on each token alone. So the model's attention function is
exchanged for one that does as `sdpa` where it is told of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from deepswe.algorithms.packing import Branch, MicroBatch, Stretch, TrainingSample
from deepswe.algorithms.prefix import collate_tree
from deepswe.errors import TrainingError
from deepswe.training.forward_parts import attend_in_parts, parts_of

NAME = "deepswe_rows_of_samples"
BLOCK = 1024
"""Queries at once: a block does not look at the keys behind it, which a mask would only hide."""


def attend_along(model: Any) -> None:
    """Exchange the attention of a `transformers` model for `along`, in place, and try on a few tokens if it serves.

    Raises:
        TrainingError: it does not: the model looks back in another way, or takes no attention from outside.
    """
    if not sees_all(model.config.get_text_config()):
        raise TrainingError(_refused(model, "it has layers without full attention"))
    AttentionInterface.register(NAME, along)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError) as error:
        raise TrainingError(_refused(model, str(error))) from error
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    decoder, device = model.get_decoder(), next(model.parameters()).device
    with torch.no_grad():
        sequences = [torch.tensor(ids) for ids in ((0, 1, 1, 0), (0, 1, 0, 1, 1), (0, 1, 0, 0))]
        batch = collate_tree([_bare(tokens_L) for tokens_L in sequences]).to(device)
        states_NH = states_along(decoder, batch).index_select(0, _given(batch.from_N))
        alone = [decoder(input_ids=t[None].to(device), use_cache=False).last_hidden_state[0, :-1] for t in sequences]
        wide = all(parameter.dtype.itemsize >= 4 for parameter in model.parameters())
        tolerance = 1e-3 if wide else 0.1  # frozen weights of bfloat16 round in another order
        if not torch.allclose(states_NH, torch.cat(alone), rtol=tolerance, atol=tolerance):
            raise TrainingError(_refused(model, "it gives other states than for each sample alone"))


def states_along(decoder: nn.Module, batch: MicroBatch) -> Tensor:
    """The hidden states (T, H) of the tokens of a row of branches."""
    unused = torch.zeros(1, 1, 1, 1, device=batch.tokens_BT.device)  # four dimensions: no mask is made
    made = decoder(
        input_ids=batch.tokens_BT,
        position_ids=batch.position_BT,
        attention_mask=unused,
        use_cache=False,
        branches=batch.branches,
    )
    states_TH: Tensor = made.last_hidden_state[0]
    return states_TH


def along(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    branches: Sequence[Branch] | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a row (1, heads, T, width) along its branches; without any, `sdpa`'s."""
    if branches is None:
        made = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return made[0], None
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    attend = _in_parts if query.device.type == "cpu" else _under_masks
    return attend(query, key, value, branches, scaling).transpose(1, 2).contiguous(), None


def _in_parts(query: Tensor, key: Tensor, value: Tensor, branches: Sequence[Branch], scaling: float | None) -> Tensor:
    # Under autocast the values alone are narrow; the kernel takes one type, and is slower in that one.
    kind = torch.promote_types(query.dtype, value.dtype)
    query, key, value = query.to(kind), key.to(kind), value.to(kind)
    return attend_in_parts(query, key, value, parts_of(branches), scaling=scaling)


def _under_masks(
    query: Tensor, key: Tensor, value: Tensor, branches: Sequence[Branch], scaling: float | None
) -> Tensor:
    """Branch by branch, on any device."""
    row = _Cut(branches)
    queries, keys, values = row.pieces(query), row.pieces(key), row.pieces(value)
    parts = []
    for branch in branches:
        path = [*branch.before, branch.own]
        own, along, worth = row.join(queries, [branch.own]), row.join(keys, path), row.join(values, path)
        parts += _branch(branch.depth, own, along, worth, scaling)
    return torch.cat(parts, dim=2)


class _Cut:
    """A row cut wherever a stretch of a branch begins or ends.

    Each piece is cut out once, and what needs several puts them together: the gradient of a slice is as large as the
    whole row, and there would be one for every stretch of every branch.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        stretches = [stretch for branch in branches for stretch in (*branch.before, branch.own)]
        places = sorted({place for stretch in stretches for place in stretch})
        self._index = {place: index for index, place in enumerate(places)}
        self._sizes = [end - start for start, end in pairwise(places)]

    def pieces(self, states: Tensor) -> Sequence[Tensor]:
        """All pieces of (1, heads, T, width), in order."""
        return torch.split(states, self._sizes, dim=2)

    def join(self, pieces: Sequence[Tensor], stretches: Sequence[Stretch]) -> Tensor:
        """Those of some stretches as one."""
        chosen = [piece for start, end in stretches for piece in pieces[self._index[start] : self._index[end]]]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=2)


def _branch(depth: int, own: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> list[Tensor]:
    """What the queries of a branch gather, with `depth` keys before their own."""
    if not depth:
        return [scaled_dot_product_attention(own, keys, values, is_causal=True, scale=scaling)]
    made, count = [], own.shape[2]
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        seen = torch.ones(last - first, depth + last, dtype=torch.bool, device=own.device).tril(depth + first)
        made.append(
            scaled_dot_product_attention(
                own[:, :, first:last],
                keys[:, :, : depth + last],
                values[:, :, : depth + last],
                attn_mask=seen,
                scale=scaling,
            )
        )
    return made


def _bare(tokens_L: Tensor) -> TrainingSample:
    """A sample whose every token but the first is trained."""
    zeros = torch.zeros(len(tokens_L))
    mask = torch.arange(len(tokens_L)) > 0
    return TrainingSample(tokens_L, mask, zeros, zeros, torch.zeros(len(tokens_L), dtype=torch.int64))


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def sees_all(config: Any) -> bool:
    """Whether every layer looks back all the way."""
    kinds = getattr(config, "layer_types", None)
    return set(kinds) == {"full_attention"} if kinds else not getattr(config, "sliding_window", None)


def _refused(model: nn.Module, why: str) -> str:
    return f"{type(model).__name__} cannot take rows of many samples ({why}); set training.packing to 'padded'"
