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
        entropy_N: entropy in nats of the distribution each was drawn from; no gradient.
    """

    logp_N: Tensor
    entropy_N: Tensor


class TokenScorer:
    """Scores trained tokens with a causal LM.

    The decoder runs on the padded batch without an attention mask (the padding is on the right). The head runs on
    the positions that predict a trained token, in chunks, so that memory does not grow with vocabulary x length.
    Where decoder and head do not compose to the model's own logits (a soft cap, a scale), which is tried once on two
    tokens, the whole model runs instead. The model stays in its mode; call `eval()` for a policy without dropout.
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, bfloat16: bool = False) -> None:
        """Args:
        model: with `get_output_embeddings()`, as every `transformers` causal LM has.
        temperature: the one that the sampler's log-probs are at.
        bfloat16: run the forward pass under autocast; parameters stay float32.
        """
        self.model = model
        self.temperature = temperature
        self.bfloat16 = bfloat16
        self._decoder, self._head = _parts(model)

    def __call__(self, batch: MicroBatch) -> TokenScores:
        """Score the trained tokens of `batch`."""
        predicting_BT = batch.mask_BT[:, 1:]
        targets_N = batch.tokens_BT[:, 1:][predicting_BT]
        with self._autocast(batch.tokens_BT.device):
            if self._decoder is None:
                logits_NV = _logits(self.model, batch.tokens_BT)[:, :-1][predicting_BT]
                return TokenScores(*_score(logits_NV, targets_N, self.temperature))
            hidden_BTH = self._decoder(input_ids=batch.tokens_BT, use_cache=False).last_hidden_state
            hidden_NH = hidden_BTH[:, :-1][predicting_BT]
            return self._score_in_chunks(hidden_NH, targets_N)

    def _score_in_chunks(self, hidden_NH: Tensor, targets_N: Tensor) -> TokenScores:
        rows = max(1, LOGITS_PER_CHUNK // _vocabulary(self._head))
        if len(targets_N) <= rows:
            return TokenScores(*self._score_chunk(hidden_NH, targets_N))
        parts: list[tuple[Tensor, Tensor]] = [
            checkpoint(self._score_chunk, hidden, targets, use_reentrant=False)
            for hidden, targets in zip(torch.split(hidden_NH, rows), torch.split(targets_N, rows), strict=True)
        ]
        return TokenScores(torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts]))

    def _score_chunk(self, hidden_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        return _score(self._head(hidden_NH), targets_N, self.temperature)

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=torch.bfloat16) if self.bfloat16 else nullcontext()


def _score(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies without gradient); at least in float32."""
    wide = logits_NV.dtype if logits_NV.dtype == torch.float64 else torch.float32
    logp_NV = (logits_NV.to(wide) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return logp_NV.gather(1, targets_N[:, None])[:, 0], entropy_N


def _logits(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits


def _vocabulary(head: nn.Module) -> int:
    weight = head.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _parts(model: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """(decoder, head), the decoder None where the two do not compose to the model's logits."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Module) or not isinstance(getattr(head, "weight", None), Tensor):
        raise TrainingError(f"{type(model).__name__} has no output embeddings; use a causal language model")
    decoder = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    if not isinstance(decoder, nn.Module) or decoder is model:
        return None, head
    probe_BT = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    with torch.no_grad():
        whole = _logits(model, probe_BT)
        composed = head(decoder(input_ids=probe_BT, use_cache=False).last_hidden_state)
    same = whole.shape == composed.shape and torch.allclose(whole, composed, rtol=1e-4, atol=1e-4)
    return (decoder if same else None), head
