"""The weights of a learner as other programs take them: whole, without adapters, under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deepswe.training.lora import adapters, plain_name
from deepswe.training.sharded import reshard, whole


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each weight, whole and on the CPU, one after the other; those that are tied come once.

    With adapters they are merged: the names and values are those of a plain model that acts alike. With shards it is a
    collective: every process goes through all of it, and each holds one whole weight at a time.
    """
    reshard(model)
    small = {
        name: whole(p.detach()).cpu() for name, p in model.named_parameters() if p.requires_grad and "lora_" in name
    }
    merged = adapters(model, small)
    named = [*model.named_parameters(), *_kept_buffers(model)]
    for name, value in named:
        plain = plain_name(name)
        if plain is not None:
            weight = whole(value.detach()).cpu()
            yield plain, merged[name].merged(weight) if name in merged else weight


def export_model(model: Any, tokenizer: Any, path: Path, *, writes: bool = True) -> None:
    """Write what `from_pretrained` loads.

    Args:
        model: a `transformers` model, whole, sharded or with adapters.
        tokenizer: written beside it, unless None.
        path: a directory.
        writes: whether this process is the one that writes; with shards every process must call.
    """
    if is_plain(model):
        model.save_pretrained(path)
    else:
        held = {name: weight for name, weight in whole_weights(model) if writes}
        if not writes:
            return
        model.save_pretrained(path, state_dict=held)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def is_plain(model: Any) -> bool:
    """Whether a model has neither shards nor adapters, so that it can be written as it is."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return not any(isinstance(value, DTensor) or plain_name(name) != name for name, value in named)


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = model.state_dict()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
