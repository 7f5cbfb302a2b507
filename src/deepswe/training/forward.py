"""The forward pass of training: log-probs of the trained tokens of a micro-batch, from any Hugging Face causal LM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepswe.algorithms.packing import MicroBatch
from deepswe.errors import TrainingError
from deepswe.training.forward_family import FamilyForward, family_forward, serves
from deepswe.training.forward_head import Chunks, every_chunk, is_plain, score_by_head
from deepswe.training.forward_rows import states_along

LOGITS_PER_CHUNK = 1 << 25
"""Logits alive at once (128 MiB in float32): longer batches compute the head in chunks, and again in the backward. Four
times as many on a GPU, where a chunk must be large enough that reading the matrix is not what takes the time."""


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
    Where decoder and head do not compose to the model's own logits (a soft cap, a scale), the whole model runs
    instead. A model that `forward_family` serves goes its way. The model stays in its mode; call `eval()` for a policy
    without dropout.

    Attributes:
        chunks: which chunks of a plain head are computed; the planner leaves out those that cost what others do.
        run: what a call runs; `forward`, unless the one who shards the model has put a wrapper around it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        bfloat16: bool = False,
        values: nn.Module | None = None,
        entropy_gradient: bool = False,
        composed: bool | None = None,
        own_pass: bool | None = None,
    ) -> None:
        """Args:
        model: with `get_output_embeddings()`, as every `transformers` causal LM has.
        temperature: the one that the sampler's log-probs are at.
        bfloat16: run the forward pass under autocast; parameters stay float32.
        values: a head from hidden states to values; None for no values.
        entropy_gradient: whether the entropies carry a gradient.
        composed: what `composes(model)` said, where this process cannot try it; None tries it.
        own_pass: whether it goes the way of `forward_family`, which is then neither asked nor tried; None where that
            serves the model, at each call anew.

        Raises:
            TrainingError: the model is no causal LM, or has no hidden states for the value head.
        """
        self.model = model
        self.temperature = temperature
        self.bfloat16 = bfloat16
        self._values = values
        self._entropy_gradient = entropy_gradient
        self.chunks: Chunks = every_chunk
        self._head = _output_embeddings(model)
        self._decoder = _decoder(model) if (composes(model) if composed is None else composed) else None
        self._family = FamilyForward(model) if own_pass else None
        self._asks = own_pass is None
        if self._asks and self._decoder is not None and not bfloat16:
            self._family = family_forward(model, lambda batch: self._plain_states(batch)[0])
        self.run: Callable[[MicroBatch], tuple[Tensor, Tensor, Tensor | None]] = self.forward
        if values is not None and self._decoder is None:
            raise TrainingError(
                f"{type(model).__name__} does not give the hidden states under its logits, which a value head needs; "
                "use another algorithm.advantage than gae, or another model"
            )

    def __call__(self, batch: MicroBatch) -> TokenScores:
        """Score the trained tokens of `batch`."""
        return TokenScores(*self.run(batch))

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """The fields of the scores of `batch`, as a plain tuple."""
        with self._autocast(batch.tokens_BT.device):
            if self._decoder is None and batch.branches is None:
                predicting_BT = batch.mask_BT[:, 1:]
                logits_NV = _logits(self.model, batch.tokens_BT)[:, :-1][predicting_BT]
                return (*self._score(logits_NV, batch.tokens_BT[:, 1:][predicting_BT]), None)
            if self._family is not None and len(batch.row_N) and (not self._asks or serves(self.model)):
                return self._score_states(*self._family(batch))
            return self._score_states(*self._plain_states(batch))

    def _plain_states(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(hidden states under the logits, trained tokens), by the model's own forward."""
        if batch.branches is None and self._decoder is not None:
            predicting_BT = batch.mask_BT[:, 1:]
            hidden_BTH = self._decoder(input_ids=batch.tokens_BT, use_cache=False).last_hidden_state
            return hidden_BTH[:, :-1][predicting_BT], batch.tokens_BT[:, 1:][predicting_BT]
        if self._decoder is None or batch.from_N is None or batch.target_N is None:
            raise TrainingError(
                f"{type(self.model).__name__} does not give the hidden states under its logits, which rows of many "
                "samples need; set training.packing to 'padded'"
            )
        return states_along(self._decoder, batch).index_select(0, batch.from_N), batch.target_N

    def _score_states(self, hidden_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        logp_N, entropy_N = self.score_hidden(hidden_NH, targets_N)
        value_N = None if self._values is None else self._values(hidden_NH)[:, 0].to(logp_N.dtype)
        return logp_N, entropy_N, value_N

    def score_hidden(self, hidden_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs of the targets, entropies), from the hidden states under their logits."""
        limit = LOGITS_PER_CHUNK * (1 if hidden_NH.device.type == "cpu" else 4)
        rows = max(1, limit // _vocabulary(self._head))
        if is_plain(self._head) and not self._entropy_gradient:
            return score_by_head(
                self._head, hidden_NH, targets_N, temperature=self.temperature, rows=rows, chunks=self.chunks
            )
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


def _logits(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
    return logits


def _vocabulary(head: nn.Module) -> int:
    weight = head.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def checkpoint_layers(model: nn.Module) -> None:
    """Keep of each layer of the decoder only its input, and compute the rest again in the backward pass; in place.

    Around the layer's own `forward`, so that hooks on the module (FSDP's) stay outside, and in any mode of the model
    (that of `transformers` acts in training mode alone).
    """
    for layer in layers_of(model):
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the longest list of modules of one class.

    Raises:
        TrainingError: there is none.
    """
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [modules for modules in lists if len({type(module) for module in modules}) == 1]
    if not alike:
        raise TrainingError(
            f"{type(model).__name__} has no list of layers, which training.activation_checkpointing and training by "
            "several processes need"
        )
    return max(alike, key=len)


def _decoder(model: nn.Module) -> nn.Module | None:
    decoder = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else None


@torch.no_grad()
def composes(model: nn.Module) -> bool:
    """Try on two tokens whether decoder and head, one after the other, give the model's own logits.

    Raises:
        TrainingError: the model has no head.
    """
    head, decoder = _output_embeddings(model), _decoder(model)
    if decoder is None:
        return False
    probe_BT = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    whole = _logits(model, probe_BT)
    composed = head(decoder(input_ids=probe_BT, use_cache=False).last_hidden_state)
    return whole.shape == composed.shape and torch.allclose(whole, composed, rtol=1e-4, atol=1e-4)


def _output_embeddings(model: nn.Module) -> nn.Module:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Module) or not isinstance(getattr(head, "weight", None), Tensor):
        raise TrainingError(f"{type(model).__name__} has no output embeddings; use a causal language model")
    return head
