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
from torch.nn.functional import linear, rms_norm, silu
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from deepswe.errors import PolicyError
from deepswe.policy.rows import Pass, RowCache

NAME = "deepswe_rows"
FAMILY = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Decoder(Protocol):
    """Computes the new tokens of a pass."""

    def __call__(self, ids_T: Tensor, rows: Pass, cache: RowCache, places_N: Tensor) -> Tensor:
        """Write keys and values into the cache; return the logits (N, V) after some of the tokens, in float32."""
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
class _Linear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    before: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: _Linear
    after: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    size: int
    scale: float


class FamilyDecoder:
    """Llama, Qwen2 and Qwen3, straight from their parameters."""

    def __init__(self, model: Any) -> None:
        """Args:
        model: one that `is_of_family`.
        """
        body = model.model
        self._embeddings: Tensor = body.embed_tokens.weight
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = body.rotary_emb
        self._layers = [_layer(module) for module in body.layers]
        self._norm = _norm(body.norm)
        self._head: Tensor = model.lm_head.weight

    def __call__(self, ids_T: Tensor, rows: Pass, cache: RowCache, places_N: Tensor) -> Tensor:
        """As `Decoder`."""
        cache.aimed = rows
        states_TH = self._embeddings[ids_T]
        cos_1TD, sin_1TD = self._rotary(states_TH[None], rows.position_T[None])
        turn = cos_1TD[0][:, None], _signed(sin_1TD[0])[:, None]
        for number, layer in enumerate(self._layers):
            states_TH = states_TH + _gathered(layer, layer.before(states_TH), turn, number, rows, cache)
            inner_TH = layer.after(states_TH)
            states_TH = states_TH + layer.down(silu(layer.gate(inner_TH)).mul_(layer.up(inner_TH)))
        return linear(self._norm(states_TH[places_N]), self._head)


def _gathered(
    layer: _Layer, states_TH: Tensor, turn: tuple[Tensor, Tensor], number: int, rows: Pass, cache: RowCache
) -> Tensor:
    count = len(states_TH)
    query_THD = layer.query(states_TH).view(count, -1, layer.size)
    key_THD = layer.key(states_TH).view(count, -1, layer.size)
    if layer.query_norm is not None and layer.key_norm is not None:
        query_THD, key_THD = layer.query_norm(query_THD), layer.key_norm(key_THD)
    storage = cache.row_layers[number]
    storage.write(_turned(key_THD, *turn), layer.value(states_TH).view(count, -1, layer.size))
    made_THD = rows.attend(number, _turned(query_THD, *turn), storage.keys, storage.values, layer.scale)
    return layer.output(made_THD.view(count, -1))


def _signed(sin_TD: Tensor) -> Tensor:
    """The sine with its first half negated, so that a turn needs no negated copy of the states."""
    half = sin_TD.shape[-1] // 2
    return torch.cat((-sin_TD[:, :half], sin_TD[:, half:]), dim=-1)


def _turned(states_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary positions; each half of a head is turned by the other."""
    half = states_THD.shape[-1] // 2
    return torch.addcmul(states_THD * cos_T1D, states_THD.roll(half, -1), sin_T1D)


def _layer(module: Any) -> _Layer:
    attention, inner = module.self_attn, module.mlp
    normed = hasattr(attention, "q_norm")
    return _Layer(
        before=_norm(module.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
        output=_linear(attention.o_proj),
        after=_norm(module.post_attention_layernorm),
        gate=_linear(inner.gate_proj),
        up=_linear(inner.up_proj),
        down=_linear(inner.down_proj),
        size=attention.head_dim,
        scale=attention.scaling,
    )


def _linear(module: nn.Linear) -> _Linear:
    return _Linear(module.weight, module.bias)


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


def is_of_family(model: PreTrainedModel) -> bool:
    """Whether `FamilyDecoder` computes this model: one of the three, plain linear maps, float32, nothing hooked in."""
    if type(model).__name__ not in FAMILY or type(model).__module__.split(".")[0] != "transformers":
        return False
    if getattr(model.config, "hidden_act", "") != "silu":
        return False
    plain = all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
    adapted = any(name.endswith(("lora_A", "base_layer")) for name, _ in model.named_modules())
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return plain and not adapted and not hooked and all(p.dtype == torch.float32 for p in model.parameters())


def make_decoder(
    model: PreTrainedModel, *, autocast: torch.dtype | None, windows: list[int | None], layers: int
) -> Decoder:
    """The fastest way through a model, after it was tried on a few tokens.

    Raises:
        PolicyError: the model's attention cannot be exchanged, or looks back in another way.
    """
    whole = ModelDecoder(model, autocast)
    decoder: Decoder = FamilyDecoder(model) if autocast is None and is_of_family(model) else whole
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
