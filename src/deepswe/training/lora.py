"""LoRA (arXiv 2106.09685): the weights of a model stand still, and each matrix W acts as W + (alpha / rank) B A.

The adapters are peft's, put into the model in place, so that it stays the class that it was: engine, learner and scorer
see no difference. B begins at 0, so the model begins unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepswe.config import LoraAdapters
from deepswe.errors import ConfigError
from deepswe.optional import optional_module

_BASE = ".base_layer."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def add_lora(model: nn.Module, config: LoraAdapters, *, seed: int, narrow: bool = False) -> None:
    """Freeze a model and put adapters of float32 into it, in place.

    Args:
        model: any causal LM.
        config: rank, alpha and the layers that get one.
        seed: draws the A matrices. The global generator of torch is left as it was.
        narrow: hold the frozen weights in bfloat16, which halves them; forward passes then run under autocast.

    Raises:
        ConfigError: peft is not installed, or a target names no layer.
    """
    peft = optional_module("peft", "lora", "train with model.lora")
    targets = list(config.targets) or matrices(model)
    if narrow:
        model.to(torch.bfloat16)
    model.requires_grad_(False)
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, bias="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model)
        except ValueError as error:
            raise ConfigError(f"model.lora.targets {config.targets} do not fit the model: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((_A, _B)))
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.train(False)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Of one matrix: W + scale B A."""

    down_RI: Tensor
    up_OR: Tensor
    scale: float

    def merged(self, weight_OI: Tensor) -> Tensor:
        """The matrix as it acts, in its own type."""
        change_OI = self.up_OR.to(weight_OI.device).float() @ self.down_RI.to(weight_OI.device).float()
        return (weight_OI.float() + self.scale * change_OI).to(weight_OI.dtype)


def adapters(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Adapter]:
    """The adapters of a model, by the name of the frozen weight; none of one without.

    Args:
        model: says the scales.
        weights: whole ones, by their names in the model.
    """
    found = {}
    for name, down_RI in weights.items():
        if name.endswith(_A):
            layer = name.removesuffix(_A)
            scaling: Any = model.get_submodule(layer).scaling
            found[f"{layer}{_BASE}weight"] = Adapter(down_RI, weights[layer + _B], float(scaling["default"]))
    return found


def plain_name(name: str) -> str | None:
    """The name that a weight has in the model without adapters; None for an adapter's own."""
    return None if name.endswith((_A, _B)) else name.replace(_BASE, ".")


def matrices(model: nn.Module) -> list[str]:
    """The last names of all linear layers but the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted({name.rpartition(".")[2] for name, module in named if module is not head})
