"""The optimiser of both RL and imitation: AdamW on float32 master weights, warm-up, decay, gradient clipping."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from deepswe.errors import TrainingError
from deepswe.training.sharded import whole

Decay = Literal["constant", "linear", "cosine"]


def scheduled_rate(update: int, *, peak: float, warmup: int, total: int, decay: Decay) -> float:
    """The learning rate of one update.

    Args:
        update: counted from 0.
        peak: reached with update `warmup` (linear rise; the first one of the warm-up is peak / (warmup + 1)).
        warmup: updates of the rise.
        total: updates in all; a decay reaches 0 one after the last. Updates beyond stay at 0, or `peak` if constant.
        decay: how it falls from the end of the warm-up.
    """
    if update < warmup:
        return peak * (update + 1) / (warmup + 1)
    if decay == "constant":
        return peak
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return peak * (1.0 - done) if decay == "linear" else peak * 0.5 * (1.0 + math.cos(math.pi * done))


class Optimiser:
    """Owns the AdamW state of a model. Gradients are added by the caller; `step` clips, checks and applies them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        peak: float,
        warmup: int,
        total: int = 0,
        decay: Decay = "constant",
        weight_decay: float,
        betas: tuple[float, float],
        grad_clip: float,
    ) -> None:
        """Args are those of `scheduled_rate` and of AdamW; weight decay applies to matrices only.

        Raises:
            TrainingError: a trainable parameter is narrower than float32, so small updates would be lost.
        """
        self._model = model
        self.updates = 0
        """Updates applied so far: the policy version."""
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
                raise TrainingError(
                    f"parameter {name} is {parameter.dtype}; load the model in float32 (model.dtype only sets the "
                    "type of the forward pass)"
                )
        self._schedule: dict[str, Any] = {"peak": peak, "warmup": warmup, "total": total, "decay": decay}
        self._grad_clip = grad_clip
        matrices = [parameter for parameter in self._parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=peak,
            betas=betas,
            fused=True,
        )

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        return scheduled_rate(self.updates, **self._schedule)

    def step(self) -> float:
        """Clip the gradients, apply them, clear them; return their norm before clipping.

        Raises:
            TrainingError: the norm is not finite; the weights are as before and the gradients cleared.
        """
        norm = float(whole(nn.utils.clip_grad_norm_(self._parameters, self._grad_clip)))
        if not math.isfinite(norm):
            self.clear()
            raise TrainingError(
                f"the gradient norm of update {self.updates + 1} is {norm}; the weights are unchanged: resume from the "
                "last checkpoint with a lower training.learning_rate or training.grad_clip"
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.rate
        self._adamw.step()
        self.clear()
        self.updates += 1
        return norm

    def clear(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """All that a later `load_state_dict` needs to go on exactly; with shards, by the names of the weights."""
        named = get_optimizer_state_dict(self._model, self._adamw) if self._sharded else self._adamw.state_dict()
        return {"adamw": named, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state of the same model."""
        if self._sharded:
            set_optimizer_state_dict(self._model, self._adamw, state["adamw"])
        else:
            self._adamw.load_state_dict(state["adamw"])
        self.updates = int(state["updates"])

    @property
    def _sharded(self) -> bool:
        return any(isinstance(parameter, DTensor) for parameter in self._parameters)
