"""The forward pass over a row of many samples, end to end or as a prefix tree (`deepswe.algorithms.prefix`).

Attention goes along each branch and what is before it; a mask over the whole row would cost the square of its length.
Only attention knows of branches: all else in a decoder works on each token alone. So the model's attention function is
exchanged for one that does as `sdpa` where it is told of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from deepswe.algorithms.packing import Branch, MicroBatch, TrainingSample
from deepswe.algorithms.prefix import collate_tree
from deepswe.errors import TrainingError

NAME = "deepswe_rows_of_samples"
BLOCK = 1024
"""Queries at once: a block does not look at the keys behind it, which a mask would only hide."""


def attend_along(model: Any) -> None:
    """Exchange the attention of a `transformers` model for `along`, in place, and try on a few tokens if it serves.

    Raises:
        TrainingError: it does not: the model looks back in another way, or takes no attention from outside.
    """
    if not _sees_all(model.config.get_text_config()):
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
        if not torch.allclose(states_NH, torch.cat(alone), rtol=1e-3, atol=1e-3):
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
    parts = [part for branch in branches for part in _branch(branch, query, key, value, scaling, groups)]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _branch(
    branch: Branch, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, groups: int
) -> list[Tensor]:
    start, end = branch.own
    keys, values = (repeat_kv(_along(branch, states), groups) for states in (key, value))
    depth, own = branch.depth, query[:, :, start:end]
    if not depth:
        return [scaled_dot_product_attention(own, keys, values, is_causal=True, scale=scaling)]
    made = []
    for first in range(0, end - start, BLOCK):
        last = min(first + BLOCK, end - start)
        seen = torch.ones(last - first, depth + last, dtype=torch.bool, device=query.device).tril(depth + first)
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


def _along(branch: Branch, states: Tensor) -> Tensor:
    """Keys or values of the tokens before a branch and of its own, in order."""
    stretches = [*branch.before, branch.own]
    if len(stretches) == 1:
        return states[:, :, branch.own[0] : branch.own[1]]
    return torch.cat([states[:, :, start:end] for start, end in stretches], dim=2)


def _bare(tokens_L: Tensor) -> TrainingSample:
    """A sample whose every token but the first is trained."""
    zeros = torch.zeros(len(tokens_L))
    mask = torch.arange(len(tokens_L)) > 0
    return TrainingSample(tokens_L, mask, zeros, zeros, torch.zeros(len(tokens_L), dtype=torch.int64))


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _sees_all(config: Any) -> bool:
    """Whether every layer looks back all the way."""
    kinds = getattr(config, "layer_types", None)
    return set(kinds) == {"full_attention"} if kinds else not getattr(config, "sliding_window", None)


def _refused(model: nn.Module, why: str) -> str:
    return f"{type(model).__name__} cannot take rows of many samples ({why}); set training.packing to 'padded'"
