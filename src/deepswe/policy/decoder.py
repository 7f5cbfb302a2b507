"""One pass of the embedded engine through a model: any causal LM of `transformers`, and the Llama family without it.

Both read the very parameters that the learner trains. The first runs the model's own forward with another attention
function; the second computes the same for Llama, Qwen2 and Qwen3 in float32, in a third of the calls, which is what a
small model's time goes into. Each is tried on a few tokens when an engine opens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from deepswe.errors import PolicyError
from deepswe.policy.products import Product
from deepswe.policy.rows import Pass, RowCache, RowLayer

NAME = "deepswe_rows"
FAMILY = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
FIXED_TURNS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions in which the turn of a position depends on nothing else."""


class Decoder(Protocol):
    """Computes the new tokens of a pass."""

    def __call__(self, ids_T: Tensor, rows: Pass, cache: RowCache, places_N: Tensor) -> Tensor:
        """Write keys and values into the cache; return the logits (N, V) after some of the tokens, in float32, which
        are the caller's to change."""
        ...

    def renew(self) -> None:
        """The weights may have changed."""
        ...


class ModelDecoder:
    """The model's own forward pass, with attention over rows."""

    def __init__(self, model: PreTrainedModel, autocast: torch.dtype | None) -> None:
        """Raises:
        PolicyError: the model takes no cache or positions.
        """
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self._model, self._autocast = model, autocast
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        if self._cache_argument not in accepted or "position_ids" not in accepted:
            raise PolicyError(f"{type(model).__name__}.forward takes no cache and position_ids; use another model")
        self._keeps = "logits_to_keep" in accepted
        self._device = next(model.parameters()).device

    def __call__(self, ids_T: Tensor, rows: Pass, cache: RowCache, places_N: Tensor) -> Tensor:
        """As `Decoder`."""
        cache.aimed = rows
        options: dict[str, Any] = {self._cache_argument: cache, "rows": rows}
        if self._keeps:
            options["logits_to_keep"] = places_N
        unused = torch.zeros(1, 1, 1, 1, device=self._device)  # four dimensions: no mask is made
        with _attending(self._model), self._precision():
            output = self._model(
                input_ids=ids_T[None],
                attention_mask=unused,
                position_ids=rows.position_T[None],
                use_cache=True,
                **options,
            )
            logits_TV: Tensor = output.logits[0]
            return (logits_TV if self._keeps else logits_TV[places_N]).float()

    def renew(self) -> None:
        """As `Decoder`; nothing is kept of them."""

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._autocast, cache_enabled=False)


@contextmanager
def _attending(model: PreTrainedModel) -> Iterator[None]:
    """The model's attention over rows inside; the learner, which has the same module, never runs meanwhile."""
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Pass,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a pass: queries (1, heads, T, D) on the storage of all rows."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query_THD = query[0].transpose(0, 1).contiguous()
    return rows.attend(module.layer_idx, query_THD, key, value, scale)[None], None


@dataclass(frozen=True, slots=True)
class _Norm:
    """Root mean square over the last dimension; the weight is `shape` (..., D)."""

    weight: Tensor
    epsilon: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        mean = torch.addcmul(self.epsilon, size, size, value=1 / states.shape[-1])
        return (states * mean.rsqrt_()).mul_(self.weight)


class _Layer:
    """One layer as its weights are now; heads of queries and keys are normed and turned together."""

    def __init__(self, module: Any, kind: torch.dtype) -> None:
        attention, inner = module.self_attn, module.mlp
        self.before, self.after = _norm(module.input_layernorm), _norm(module.post_attention_layernorm)
        self.seen = Product((attention.q_proj, attention.k_proj, attention.v_proj), kind)
        self.output = Product((attention.o_proj,), kind)
        self.inner = Product((inner.gate_proj, inner.up_proj), kind)
        self.down = Product((inner.down_proj,), kind)
        self.size: int = attention.head_dim
        self.scale: float = attention.scaling
        self.heads = attention.q_proj.out_features // self.size
        self.lanes = attention.k_proj.out_features // self.size
        self.head_norm: _Norm | None = None
        if hasattr(attention, "q_norm"):
            query, key = _norm(attention.q_norm), _norm(attention.k_norm)
            weights = [query.weight.expand(self.heads, -1), key.weight.expand(self.lanes, -1)]
            self.head_norm = _Norm(torch.cat(weights), query.epsilon)


class FamilyDecoder:
    """Llama, Qwen2 and Qwen3, straight from their parameters, in float32 or with products and caches in bfloat16."""

    def __init__(self, model: Any, kind: torch.dtype) -> None:
        """Args:
        model: one that `is_of_family`.
        kind: float32 or bfloat16.
        """
        self._model, self._kind = model, kind
        self._places = _Places(model.model.rotary_emb)
        self._weights: tuple[Tensor, ...] = ()
        self._state: tuple[int, ...] = ()
        self._layers: list[_Layer] = []

    def renew(self) -> None:
        """As `Decoder`."""
        self._weights = ()

    def __call__(self, ids_T: Tensor, rows: Pass, cache: RowCache, places_N: Tensor) -> Tensor:
        """As `Decoder`."""
        if not self._weights or self._state != tuple(weight._version for weight in self._weights):
            self._take_up()
        cache.aimed = rows
        states_TH = self._embeddings.index_select(0, ids_T)
        turn = self._places(rows)
        for number, layer in enumerate(self._layers):
            storage = cache.row_layers[number]
            query_THD = _seen(layer, layer.before(states_TH), turn, storage)
            if layer is self._layers[-1] and not rows.only_singles:
                # Of the last layer nothing but the states of the last tokens is looked at.
                rows, place_E, of_T = rows.ends()
                query_THD, states_TH = query_THD.index_select(0, place_E), states_TH.index_select(0, place_E)
                places_N = of_T[places_N]
            made_THD = rows.attend(number, query_THD, storage.keys, storage.values, layer.scale)
            states_TH += layer.output(made_THD.reshape(len(states_TH), -1))
            inner_TI = layer.inner(layer.after(states_TH))
            gate_TI, up_TI = inner_TI.chunk(2, dim=-1)
            states_TH += layer.down(silu(gate_TI).mul_(up_TI))
        return self._head(self._norm(states_TH.index_select(0, places_N))).float()

    def _take_up(self) -> None:
        """The weights as they are now."""
        self._weights = ()  # where this fails, nothing is taken for prepared
        self._layers.clear()  # the copies before, which would stand beside the new ones
        weights = tuple(self._model.parameters())
        state = tuple(weight._version for weight in weights)
        body = self._model.model
        self._embeddings: Tensor = body.embed_tokens.weight
        self._norm = _norm(body.norm)
        self._head = Product((self._model.lm_head,), self._kind)
        self._layers += [_Layer(module, self._kind) for module in body.layers]
        self._weights, self._state = weights, state


def _seen(layer: _Layer, states_TH: Tensor, turn: tuple[Tensor, Tensor], storage: RowLayer) -> Tensor:
    """Write keys and values; return the queries (T, heads, D)."""
    seen_THD = layer.seen(states_TH).view(len(states_TH), -1, layer.size)
    turned = layer.heads + layer.lanes
    both_THD = seen_THD[:, :turned].float()
    if layer.head_norm is not None:
        both_THD = layer.head_norm(both_THD)
    both_THD = _turned(both_THD, *turn).to(seen_THD.dtype)
    storage.write(both_THD[:, layer.heads :], seen_THD[:, turned:])
    return both_THD[:, : layer.heads]


def _turned(states_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary positions; each half of a head is turned by the other."""
    half = states_THD.shape[-1] // 2
    return torch.addcmul(states_THD * cos_T1D, states_THD.roll(half, -1), sin_T1D)


class _Places:
    """Cosines and sines (T, 1, D) of the positions of a pass, the sine with its first half negated, so that a turn
    needs no negated copy of the states; out of a table where they depend on nothing else."""

    def __init__(self, rotary: Any) -> None:
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = rotary
        self._fixed = getattr(rotary, "rope_type", "") in FIXED_TURNS
        self._device = rotary.inv_freq.device
        self._table_PD = torch.empty(0)

    def __call__(self, rows: Pass) -> tuple[Tensor, Tensor]:
        if not self._fixed:
            return _halves(self._made(rows.position_T))
        if len(self._table_PD) < rows.longest:
            self._table_PD = self._made(torch.arange(2 * rows.longest, device=self._device))
        return _halves(self._table_PD.index_select(0, rows.position_T))

    def _made(self, position_T: Tensor) -> Tensor:
        cos_1TD, sin_1TD = self._rotary(torch.empty(0, device=self._device), position_T[None])
        half = sin_1TD.shape[-1] // 2
        return torch.cat((cos_1TD[0], -sin_1TD[0, :, :half], sin_1TD[0, :, half:]), dim=-1)


def _halves(made_TD: Tensor) -> tuple[Tensor, Tensor]:
    cos_TD, sin_TD = made_TD.chunk(2, dim=-1)
    return cos_TD[:, None], sin_TD[:, None]


def _norm(module: Any) -> _Norm:
    weight = module.weight.detach()
    return _Norm(weight, torch.tensor(module.variance_epsilon, dtype=weight.dtype, device=weight.device))


def is_of_family(model: PreTrainedModel, kind: torch.dtype = torch.float32) -> bool:
    """Whether `FamilyDecoder` computes this model: one of the three, plain linear maps, weights in float32, nothing
    hooked in; in bfloat16 on a CPU alone."""
    if kind != torch.float32 and (kind != torch.bfloat16 or next(model.parameters()).device.type != "cpu"):
        return False
    if type(model).__name__ not in FAMILY or type(model).__module__.split(".")[0] != "transformers":
        return False
    if getattr(model.config, "hidden_act", "") != "silu":
        return False
    plain = all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
    adapted = any(name.endswith(("lora_A", "base_layer")) for name, _ in model.named_modules())
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    counted = not any(p.is_inference() for p in model.parameters())  # their changes leave a trace
    return (
        plain and not adapted and not hooked and counted and all(p.dtype == torch.float32 for p in model.parameters())
    )


def make_decoder(
    model: PreTrainedModel, *, autocast: torch.dtype | None, windows: list[int | None], layers: int
) -> Decoder:
    """The fastest way through a model, after it was tried on a few tokens.

    Raises:
        PolicyError: the model's attention cannot be exchanged, or looks back in another way.
    """
    whole = ModelDecoder(model, autocast)
    kind = autocast or torch.float32
    decoder: Decoder = FamilyDecoder(model, kind) if is_of_family(model, kind) else whole
    exact = autocast is None and all(p.dtype.itemsize >= 4 for p in model.parameters())
    _try(model, decoder, windows, layers, 1e-3 if exact else 0.3)
    return decoder


@torch.no_grad()
def _try(model: PreTrainedModel, decoder: Decoder, windows: list[int | None], layers: int, tolerance: float) -> None:
    device = next(model.parameters()).device
    model.train(False)
    ids_T = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1], device=device) % model.config.get_text_config().vocab_size
    cache = RowCache(layers)
    cache.reserve(2, 16)
    refused = f"the embedded engine cannot run {type(model).__name__}: use another model or engine"
    try:
        decoder(ids_T[:3], Pass([(1, 0, 3)], windows=windows, device=device), cache, torch.tensor([2], device=device))
        rows = Pass([(1, 3, 1), (0, 0, 4)], windows=windows, device=device)
        places_N = torch.tensor([0, 4], device=device)
        made_NV = decoder(ids_T[3:], rows, cache, places_N)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise PolicyError(f"{refused} ({type(error).__name__}: {error})") from error
    alone = [model(input_ids=ids[None], use_cache=False).logits[0, -1].float() for ids in (ids_T[:4], ids_T[4:])]
    if not torch.allclose(made_NV, torch.stack(alone), rtol=tolerance, atol=tolerance, equal_nan=True):
        raise PolicyError(refused)
