"""The forward pass of training: log-probs of the trained tokens of a micro-batch, from any Hugging Face causal LM."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepswe.algorithms.packing import MicroBatch
from deepswe.errors import TrainingError

LOGITS_PER_CHUNK = 1 << 25
"""Logits alive at once (128 MiB in float32): longer batches compute the head in chunks, and again in the backward."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the N trained tokens of a micro-batch, in row order.

    Attributes:
        logp_N: log-probs at the scorer's temperature, with gradient.
        entropy_N: entropy in nats of the distribution each was drawn from; with gradient only where it was asked for.
        value_N: value of the state before each, with gradient; None without a value head.
    """

    logp_N: Tensor
    entropy_N: Tensor
    value_N: Tensor | None = None


class ValueHead(nn.Linear):
    """From a hidden state to the value of that state: one linear map that begins at 0, so that values do, too."""

    @classmethod
    def on(cls, model: nn.Module) -> ValueHead:
        """A head for the hidden states of a causal LM, on its device and of its type."""
        weight = _output_embeddings(model).weight
        assert isinstance(weight, Tensor)
        head = cls(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head


class TokenScorer:
    """Scores trained tokens with a causal LM.

    The decoder runs on the padded batch without an attention mask (the padding is on the right). The head runs on
    the positions that predict a trained token, in chunks, so that memory does not grow with vocabulary x length.
    Where decoder and head do not compose to the model's own logits (a soft cap, a scale), which is tried once on two
    tokens, the whole model runs instead. The model stays in its mode; call `eval()` for a policy without dropout.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        bfloat16: bool = False,
        values: nn.Module | None = None,
        entropy_gradient: bool = False,
    ) -> None:
        """Args:
        model: with `get_output_embeddings()`, as every `transformers` causal LM has.
        temperature: the one that the sampler's log-probs are at.
        bfloat16: run the forward pass under autocast; parameters stay float32.
        values: a head from hidden states to values; None for no values.
        entropy_gradient: whether the entropies carry a gradient.

        Raises:
            TrainingError: the model is no causal LM, or has no hidden states for the value head.
        """
        self.model = model
        self.temperature = temperature
        self.bfloat16 = bfloat16
        self._values = values
        self._entropy_gradient = entropy_gradient
        self._decoder, self._head = _parts(model)
        if values is not None and self._decoder is None:
            raise TrainingError(
                f"{type(model).__name__} does not give the hidden states under its logits, which a value head needs; "
                "use another algorithm.advantage than gae, or another model"
            )

    def __call__(self, batch: MicroBatch) -> TokenScores:
        """Score the trained tokens of `batch`."""
        predicting_BT = batch.mask_BT[:, 1:]
        targets_N = batch.tokens_BT[:, 1:][predicting_BT]
        places = {} if batch.position_BT is None else {"position_ids": batch.position_BT}
        with self._autocast(batch.tokens_BT.device):
            if self._decoder is None:
                logits_NV = _logits(self.model, batch.tokens_BT, **places)[:, :-1][predicting_BT]
                return TokenScores(*self._score(logits_NV, targets_N))
            hidden_BTH = self._decoder(input_ids=batch.tokens_BT, use_cache=False, **places).last_hidden_state
            hidden_NH = hidden_BTH[:, :-1][predicting_BT]
            logp_N, entropy_N = self._score_in_chunks(hidden_NH, targets_N)
            value_N = None if self._values is None else self._values(hidden_NH)[:, 0].to(logp_N.dtype)
            return TokenScores(logp_N, entropy_N, value_N)

    def _score_in_chunks(self, hidden_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        rows = max(1, LOGITS_PER_CHUNK // _vocabulary(self._head))
        if len(targets_N) <= rows:
            return self._score_chunk(hidden_NH, targets_N)
        parts: list[tuple[Tensor, Tensor]] = [
            checkpoint(self._score_chunk, hidden, targets, use_reentrant=False)
            for hidden, targets in zip(torch.split(hidden_NH, rows), torch.split(targets_N, rows), strict=True)
        ]
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _score_chunk(self, hidden_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        return self._score(self._head(hidden_NH), targets_N)

    def _score(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        return _score(logits_NV, targets_N, self.temperature, entropy_gradient=self._entropy_gradient)

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=torch.bfloat16) if self.bfloat16 else nullcontext()


def _score(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies); at least in float32."""
    wide = logits_NV.dtype if logits_NV.dtype == torch.float64 else torch.float32
    logp_NV = (logits_NV.to(wide) / temperature).log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return logp_NV.gather(1, targets_N[:, None])[:, 0], entropy_N


def _logits(model: nn.Module, tokens_BT: Tensor, **places: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens_BT, use_cache=False, **places).logits
    return logits


def _vocabulary(head: nn.Module) -> int:
    weight = head.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _parts(model: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """(decoder, head), the decoder None where the two do not compose to the model's logits."""
    head = _output_embeddings(model)
    decoder = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    if not isinstance(decoder, nn.Module) or decoder is model:
        return None, head
    probe_BT = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    with torch.no_grad():
        whole = _logits(model, probe_BT)
        composed = head(decoder(input_ids=probe_BT, use_cache=False).last_hidden_state)
    same = whole.shape == composed.shape and torch.allclose(whole, composed, rtol=1e-4, atol=1e-4)
    return (decoder if same else None), head


def _output_embeddings(model: nn.Module) -> nn.Module:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Module) or not isinstance(getattr(head, "weight", None), Tensor):
        raise TrainingError(f"{type(model).__name__} has no output embeddings; use a causal language model")
    return head


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Try on four tokens whether the model keeps samples apart that stand end to end in one row.

    Raises:
        TrainingError: it does not; a sample would see the one before it.
    """
    device = next(model.parameters()).device
    tokens_BT, alone_BT = torch.tensor([[0, 1, 1, 0]], device=device), torch.tensor([[1, 0]], device=device)
    position_BT = torch.tensor([[0, 1, 0, 1]], device=device)
    packed = _logits(model, tokens_BT, position_ids=position_BT)[:, 2:]
    if not torch.allclose(packed, _logits(model, alone_BT), rtol=1e-3, atol=1e-3):
        raise TrainingError(
            f"{type(model).__name__} lets packed samples see each other; set training.packing to 'padded'"
        )
