"""The learner's weights as safetensors files, and its log-probs of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepswe.training.weights import Scorer, Write

SHARD_BYTES = 4 << 30
"""Weights in one file."""

NamedWeights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Each weight, whole, under the plain model's name."""


def safetensors_writer(weights: NamedWeights) -> Write:
    """Writes them, in files of some GiB."""

    def write(path: Path) -> None:
        held: dict[str, Tensor] = {}
        size, number = 0, 0
        for name, weight in weights():
            held[name] = weight.detach().cpu().contiguous()
            size += weight.numel() * weight.element_size()
            if size >= SHARD_BYTES:
                save_file(held, path / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
                held, size, number = {}, 0, number + 1
        if held:
            save_file(held, path / f"model-{number:05d}.safetensors", metadata={"format": "pt"})

    return write


def tied_names(model: Any) -> Mapping[str, str]:
    """Weight -> the other one that it is, where the model ties them."""
    return dict(model._tied_weights_keys or {}) if model.config.get_text_config().tie_word_embeddings else {}


def with_copies(weights: NamedWeights, tied: Mapping[str, str]) -> NamedWeights:
    """The weights also under the names of those that are tied to them, for servers that hold both apart."""
    copies: dict[str, list[str]] = {}
    for copy, source in tied.items():
        copies.setdefault(source, []).append(copy)

    def every() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights():
            yield name, weight
            for copy in copies.get(name, ()):
                yield copy, weight.clone()

    return every


def scorer(model: Any, *, bfloat16: bool) -> Scorer:
    """The log-probs of a whole model in this process, at temperature 1; called in a thread."""

    @torch.no_grad()
    def score(tokens: Sequence[int]) -> list[float]:
        device = next(model.parameters()).device
        ids_1T = torch.tensor([list(tokens)], device=device)
        precision: AbstractContextManager[Any] = (
            torch.autocast(device.type, torch.bfloat16) if bfloat16 else nullcontext()
        )
        with precision:
            logits_1TV = model(input_ids=ids_1T, use_cache=False).logits
        logp_TV = torch.log_softmax(logits_1TV[0, :-1].float(), dim=-1)
        values: list[float] = logp_TV.gather(1, ids_1T[0, 1:, None])[:, 0].tolist()
        return values

    return score
