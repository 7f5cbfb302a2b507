"""The forward pass of training for Llama, Qwen2 and Qwen3 in float32 on a CPU, straight from their parameters.

It computes what the modules of `transformers` do, in fewer passes over memory, and leaves out what no score depends on:

- A micro-batch is one row without padding, which attention goes along in parts (`forward_parts`).
- Each layer is one function with its gradient in closed form. The weights of a norm are multiplied into the matrices
  after it, whose gradients then hold those of the norm. Rotary positions are products of complex numbers: the rows of
  the matrices of queries and keys are exchanged so that the two numbers of a pair are neighbours.
- Before attention, the first layer maps each different token once, wherever it stands.
- The last layer has keys and values of all tokens, and all else only of those that predict a trained one.
- The inner maps go along a row in blocks that stay in a core's cache, and keep of a token only what goes into their
  products.

Shapes: T tokens of the row, R of them that predict, S rows of the states that go into a layer; H hidden size, D head
size, P pairs in a head (D / 2), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from deepswe.algorithms.packing import Branch, MicroBatch
from deepswe.policy.decoder import FIXED_TURNS, is_of_family
from deepswe.training.forward_parts import Part, attend, attend_backward, parts_of, thinned
from deepswe.training.forward_rows import sees_all

TOLERANCE = 1e-4
"""Most by which the states of a few tokens may differ from the model's own; roundings make a thousandth of it."""

BLOCK = 512
"""Tokens whose inner maps, or gradients of norms of heads, are computed at once."""

_silu_backward = torch.ops.aten.silu_backward


class _Weights(NamedTuple):
    """Those of a layer; norms of heads may be None."""

    before: Tensor
    query: Tensor
    query_bias: Tensor | None
    key: Tensor
    key_bias: Tensor | None
    value: Tensor
    value_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    after: Tensor
    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Way:
    """How tokens go through a layer.

    Attributes:
        parts: of attention.
        key_turn, query_turn: the turns (T, 1, P) and (R, 1, P) of rotary positions, as complex numbers.
        key_at: for each token, its row of the states, which are few; None where they are the same.
        query_at: for each query, its row of the states; None where they are the same.
        size, scale, epsilon: of a head, of the products of queries and keys, of the norms.
    """

    parts: list[Part]
    key_turn: Tensor
    query_turn: Tensor
    key_at: Tensor | None
    query_at: Tensor | None
    size: int
    scale: float
    epsilon: float

    @property
    def query_before(self) -> Tensor | None:
        """`query_at`, where it is fewer rows that are mapped to queries than there are."""
        return self.query_at if self.key_at is None else None

    @property
    def query_after(self) -> Tensor | None:
        """`query_at`, where it is more."""
        return None if self.key_at is None else self.query_at


class Course(NamedTuple):
    """All that a pass is told of a micro-batch.

    Attributes:
        ids_S: the different tokens.
        at_T: for each token, its row of these.
        position_T: of each token.
        longest: one more than the last position.
        predict_R: the places whose states predict a trained token.
        which_N: for each trained token, its row of these.
        target_N: the trained tokens.
        parts, kept: of attention; of all tokens, and of those that predict.
    """

    ids_S: Tensor
    at_T: Tensor
    position_T: Tensor
    longest: int
    predict_R: Tensor
    which_N: Tensor
    target_N: Tensor
    parts: list[Part]
    kept: list[Part]


def course_of(batch: MicroBatch, kind: torch.dtype) -> Course:
    """The course of a micro-batch through a model of this type."""
    row = _row_of(batch)
    predict_R, which_N = torch.unique(row.from_N, return_inverse=True)
    ids_S, at_T = torch.unique(row.tokens_T, return_inverse=True)
    return Course(
        ids_S=ids_S,
        at_T=at_T,
        position_T=row.position_T,
        longest=int(row.position_T.max()) + 1,
        predict_R=predict_R,
        which_N=which_N,
        target_N=row.target_N,
        parts=parts_of(row.branches),
        kept=thinned(row.branches, predict_R, kind),
    )


class FamilyForward:
    """The hidden states of a micro-batch from which its trained tokens are predicted."""

    def __init__(self, model: Any) -> None:
        """Args:
        model: Llama, Qwen2 or Qwen3 of `transformers`, whose parameters are read anew at each call.
        """
        self._model = model

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(the states under the logits, the trained tokens): (N, H) and (N)."""
        course = course_of(batch, self._model.model.embed_tokens.weight.dtype)
        return self.along(course), course.target_N

    def along(self, course: Course) -> Tensor:
        """The states (N, H) under the logits; it reads nothing off the numbers in tensors, which need not be any."""
        body = self._model.model
        at_T, predict_R = course.at_T, course.predict_R
        turn_TP = _turns(body.rotary_emb, course.position_T, course.longest, body.embed_tokens.weight)
        states_SH = body.embed_tokens(course.ids_S)
        last = len(body.layers) - 1
        for number, layer in enumerate(body.layers):
            attention = layer.self_attn
            key_at = None if number else at_T
            query_at = key_at if number < last else predict_R if key_at is None else key_at[predict_R]
            way = _Way(
                parts=course.kept if number == last else course.parts,
                key_turn=turn_TP,
                query_turn=turn_TP[predict_R] if number == last else turn_TP,
                key_at=key_at,
                query_at=query_at,
                size=attention.head_dim,
                scale=attention.scaling,
                epsilon=layer.input_layernorm.variance_epsilon,
            )
            states_SH = _Layer.apply(states_SH, way, *_weights(layer))  # type: ignore[no-untyped-call]
        norm = body.norm
        made_RH: Tensor = _Norm.apply(states_SH, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
        return made_RH.index_select(0, course.which_N)


def family_forward(model: nn.Module, plain: Callable[[MicroBatch], Tensor]) -> FamilyForward | None:
    """This way through a model, where it is one for it and gives the states of the plain way on a few tokens."""
    if not serves(model):
        return None
    forward = FamilyForward(model)
    mask_BT = torch.tensor([[False, True, False, True, True], [False, False, True, False, False]])
    nothing_N = torch.zeros(4)
    batch = MicroBatch(mask_BT.long(), mask_BT, nothing_N, nothing_N, nothing_N.long(), nothing_N.long())
    with torch.no_grad():
        try:
            found_NH = forward(batch)[0]
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return None
        return forward if torch.allclose(found_NH, plain(batch), rtol=TOLERANCE, atol=TOLERANCE) else None


def serves(model: Any) -> bool:
    """Whether a model is one for this way as it is now: of the family, on a CPU, nothing exchanged or dropped out."""
    if not is_of_family(model) or not sees_all(model.config):
        return False
    exchanged = any(
        "forward" in module.__dict__ or module._backward_hooks or module._backward_pre_hooks
        for module in model.modules()
    )
    dropped = model.training and getattr(model.config, "attention_dropout", 0.0) > 0.0
    fixed = getattr(model.model.rotary_emb, "rope_type", "") in FIXED_TURNS  # whatever the length of the row
    # No shards; the planner's parameters have no data.
    here = all(type(p) in (nn.Parameter, FakeTensor) and p.device.type == "cpu" for p in model.parameters())
    return here and fixed and not exchanged and not dropped and not torch.is_autocast_enabled("cpu")


class _Row(NamedTuple):
    """A micro-batch as one row without padding; from_N: the place whose state predicts each trained token."""

    tokens_T: Tensor
    position_T: Tensor
    branches: tuple[Branch, ...]
    from_N: Tensor
    target_N: Tensor


def _row_of(batch: MicroBatch) -> _Row:
    if batch.branches is not None:
        assert batch.position_BT is not None
        assert batch.from_N is not None
        assert batch.target_N is not None
        return _Row(batch.tokens_BT[0], batch.position_BT[0], batch.branches, batch.from_N, batch.target_N)
    place_T = torch.arange(batch.tokens_BT.shape[1])
    length_B = (batch.mask_BT * place_T).amax(1)  # the last trained token is predicted, and predicts nothing
    kept_BT = place_T < length_B[:, None]
    predicts_BT = batch.mask_BT[:, 1:]
    number_BT = kept_BT.flatten().cumsum(0).view_as(kept_BT) - 1
    return _Row(
        tokens_T=batch.tokens_BT[kept_BT],
        position_T=place_T.expand_as(kept_BT)[kept_BT],
        branches=tuple(
            Branch(own, ()) for own in pairwise(accumulate(length_B.tolist(), initial=0)) if own[1] > own[0]
        ),
        from_N=number_BT[:, :-1][predicts_BT],
        target_N=batch.tokens_BT[:, 1:][predicts_BT],
    )


def _turns(rotary: Any, position_T: Tensor, longest: int, like: Tensor) -> Tensor:
    """cos + i sin of each token's positions (T, 1, P)."""
    cos, sin = rotary(like, torch.arange(longest)[None])
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half], sin[0, :, :half])[position_T, None]


def _weights(layer: Any) -> _Weights:
    attention, inner = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    return _Weights(
        before=layer.input_layernorm.weight,
        query=attention.q_proj.weight,
        query_bias=attention.q_proj.bias,
        key=attention.k_proj.weight,
        key_bias=attention.k_proj.bias,
        value=attention.v_proj.weight,
        value_bias=attention.v_proj.bias,
        query_norm=attention.q_norm.weight if normed else None,
        key_norm=attention.k_norm.weight if normed else None,
        output=attention.o_proj.weight,
        output_bias=attention.o_proj.bias,
        after=layer.post_attention_layernorm.weight,
        gate=inner.gate_proj.weight,
        gate_bias=inner.gate_proj.bias,
        up=inner.up_proj.weight,
        up_bias=inner.up_proj.bias,
        down=inner.down_proj.weight,
        down_bias=inner.down_proj.bias,
    )


class _Layer(torch.autograd.Function):
    """A layer of the decoder: attention and the inner maps, each after its norm and added to what goes in."""

    @staticmethod
    def forward(ctx: Any, states_SH: Tensor, way: _Way, *weights: Tensor | None) -> Tensor:
        w = _Weights(*weights)  # type: ignore[arg-type]
        normed_SH, rate_S1 = _normed(states_SH, way.epsilon)
        asking = _drawn(normed_SH, way.query_before)
        query, query_normed, query_rate = _heads(asking, w.before, w.query, w.query_bias, w.query_norm, way)
        key, key_normed, key_rate = _heads(normed_SH, w.before, w.key, w.key_bias, w.key_norm, way)
        value = _mapped(normed_SH, w.value * w.before, w.value_bias).view(len(normed_SH), -1, way.size)
        query = _turned(_drawn(query, way.query_after), way.query_turn)
        key, value = _turned(_drawn(key, way.key_at), way.key_turn), _drawn(value, way.key_at)
        gathered, total = attend(_by_head(query), _by_head(key), _by_head(value), way.parts, way.scale)
        made_RH = torch.addmm(_drawn(states_SH, way.query_at), _flat(gathered), w.output.T)
        if w.output_bias is not None:
            made_RH += w.output_bias
        inner_RH, inner_rate_R1 = _normed(made_RH, way.epsilon)
        gate_RI = _mapped(inner_RH, w.gate * w.after, w.gate_bias)
        up_RI = _mapped(inner_RH, w.up * w.after, w.up_bias)
        for rows in _blocks(len(made_RH)):
            made_RH[rows].addmm_(silu(gate_RI[rows]).mul_(up_RI[rows]), w.down.T)
        if w.down_bias is not None:
            made_RH += w.down_bias
        ctx.way = way
        ctx.save_for_backward(
            *(normed_SH, rate_S1, query_normed, query_rate, key_normed, key_rate, query, key, value, gathered, total),
            *(inner_RH, inner_rate_R1, gate_RI, up_RI, *weights),
        )
        return made_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_made_RH: Tensor) -> tuple[Tensor | None, ...]:
        way: _Way = ctx.way
        normed_SH, rate_S1, query_normed, query_rate, key_normed, key_rate, *rest = ctx.saved_tensors
        query, key, value, gathered, total, inner_RH, inner_rate_R1, gate_RI, up_RI, *rest = rest
        w = _Weights(*rest)
        found: dict[str, Tensor] = {}
        learns = any(ctx.needs_input_grad[2:])

        by_inner_RH, gate_IH, up_IH = torch.empty_like(inner_RH), w.gate * w.after, w.up * w.after
        for rows in _blocks(len(inner_RH)):
            open_BI = silu(gate_RI[rows])
            by_gate_BI = by_made_RH[rows] @ w.down
            by_up_BI = by_gate_BI * open_BI
            by_gate_BI = _silu_backward(by_gate_BI.mul_(up_RI[rows]), gate_RI[rows])
            torch.mm(by_gate_BI, gate_IH, out=by_inner_RH[rows]).addmm_(by_up_BI, up_IH)
            if learns:
                _find(found, "down", by_made_RH[rows], open_BI.mul_(up_RI[rows]), w.down_bias)
                _find(found, "gate", by_gate_BI, inner_RH[rows], w.gate_bias)
                _find(found, "up", by_up_BI, inner_RH[rows], w.up_bias)
        if learns:
            _share(found, "gate", w.gate, "after", w.after)
            _share(found, "up", w.up, "after", w.after)
        by_states_RH = _add_normed(by_made_RH.clone(), by_inner_RH, inner_RH, inner_rate_R1)

        if learns:
            _find(found, "output", by_states_RH, _flat(gathered), w.output_bias)
        by_gathered = _by_head((by_states_RH @ w.output).view_as(query))
        by_query, by_key, by_value = (
            by[0].transpose(0, 1)
            for by in attend_backward(
                by_gathered, _by_head(query), _by_head(key), _by_head(value), gathered, total, way.parts, way.scale
            )
        )
        asking, count = _drawn(normed_SH, way.query_before), len(normed_SH)
        by_query = _returned(_turned(by_query, way.query_turn.conj()), way.query_after, count)
        by_key = _returned(_turned(by_key, way.key_turn.conj()), way.key_at, count)
        by_value_SE = _returned(by_value, way.key_at, count).flatten(1)
        by_query_SE = _through_norm(found, "query_norm", by_query, query_normed, query_rate, w.query_norm)
        by_key_SE = _through_norm(found, "key_norm", by_key, key_normed, key_rate, w.key_norm)
        query_EH, key_EH = _paired(w.query, way.size), _paired(w.key, way.size)
        by_normed_SH = (by_key_SE @ (key_EH * w.before)).addmm_(by_value_SE, w.value * w.before)
        if way.query_before is None:
            by_normed_SH.addmm_(by_query_SE, query_EH * w.before)
        else:
            by_normed_SH.index_add_(0, way.query_before, by_query_SE @ (query_EH * w.before))
        if learns:
            _find(found, "query", by_query_SE, asking, w.query_bias)
            _find(found, "key", by_key_SE, normed_SH, w.key_bias)
            _find(found, "value", by_value_SE, normed_SH, w.value_bias)
            for name, matrix_EH in (("query", query_EH), ("key", key_EH), ("value", w.value)):
                _share(found, name, matrix_EH, "before", w.before)
            for name in ("query", "key", "query_bias", "key_bias", "query_norm", "key_norm"):
                if name in found:
                    found[name] = _parted(found[name], way.size)
        by_states_SH = _add_normed(_returned(by_states_RH, way.query_at, count), by_normed_SH, normed_SH, rate_S1)
        return by_states_SH, None, *(found.get(name) for name in _Weights._fields)


class _Norm(torch.autograd.Function):
    """A root mean square norm."""

    @staticmethod
    def forward(ctx: Any, states_SH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
        normed_SH, rate_S1 = _normed(states_SH, epsilon)
        ctx.save_for_backward(normed_SH, rate_S1, weight_H)
        return normed_SH * weight_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_made_SH: Tensor) -> tuple[Tensor, Tensor, None]:
        normed_SH, rate_S1, weight_H = ctx.saved_tensors
        by_weight_H = (by_made_SH * normed_SH).sum(0)
        by_states_SH = _add_normed(torch.zeros_like(normed_SH), by_made_SH * weight_H, normed_SH, rate_S1)
        return by_states_SH, by_weight_H, None


def _normed(states: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(states over their root mean square, one over that)."""
    rate = _rate(states, epsilon)
    return states * rate, rate


def _rate(states: Tensor, epsilon: float) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return length.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()


def _add_normed(total: Tensor, by_normed: Tensor, normed: Tensor, rate: Tensor) -> Tensor:
    """Add to a gradient that which goes through a norm, in place."""
    along = torch.linalg.vecdot(by_normed, normed).unsqueeze(-1).mul_(rate).div_(-normed.shape[-1])
    return total.addcmul_(by_normed, rate).addcmul_(normed, along)


def _heads(
    states_SH: Tensor, norm_H: Tensor, weight: Tensor, bias: Tensor | None, head_norm_D: Tensor | None, way: _Way
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(queries or keys (S, heads, D) with pairs as neighbours, and before the weights of their norm, and its rate)."""
    matrix_EH = _paired(weight, way.size).mul_(norm_H)
    made = _mapped(states_SH, matrix_EH, None if bias is None else _paired(bias, way.size))
    made = made.view(len(states_SH), -1, way.size)
    if head_norm_D is None:
        return made, None, None
    rate = _rate(made, way.epsilon)
    normed = made.mul_(rate)
    return normed * _paired(head_norm_D, way.size), normed, rate


def _through_norm(
    found: dict[str, Tensor], name: str, by: Tensor, normed: Tensor | None, rate: Tensor | None, weight_D: Tensor | None
) -> Tensor:
    """The gradient (S, E) before the norm of heads, if any, from that after it, which is used up."""
    if normed is None or rate is None or weight_D is None:
        return by.flatten(1)
    size = len(weight_D)
    weight = _paired(weight_D, size)
    for rows in _blocks(len(by)):
        product = by[rows] * normed[rows]
        _add(found, name, product.view(-1, size).sum(0))
        along = (product @ weight).unsqueeze(-1).div_(-size)
        by[rows].mul_(weight).addcmul_(normed[rows], along).mul_(rate[rows])
    return by.flatten(1)


def _find(found: dict[str, Tensor], name: str, by_SE: Tensor, states_SH: Tensor, bias: Tensor | None) -> None:
    """The gradients of a linear map, added to those of other rows."""
    if name in found:
        found[name].addmm_(by_SE.T, states_SH)
    else:
        found[name] = by_SE.T @ states_SH
    if bias is not None:
        _add(found, f"{name}_bias", by_SE.sum(0))


def _share(found: dict[str, Tensor], name: str, matrix_EH: Tensor, norm: str, norm_H: Tensor) -> None:
    """Part the gradient of a matrix that the weights of a norm were multiplied into between the two."""
    _add(found, norm, torch.einsum("eh,eh->h", found[name], matrix_EH))
    found[name].mul_(norm_H)


def _add(found: dict[str, Tensor], name: str, more: Tensor) -> None:
    found[name] = found[name] + more if name in found else more


def _blocks(count: int) -> Iterator[slice]:
    """Rows that are gone through at once."""
    return (slice(first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))


def _mapped(states_SH: Tensor, matrix_EH: Tensor, bias_E: Tensor | None) -> Tensor:
    return states_SH @ matrix_EH.T if bias_E is None else torch.addmm(bias_E, states_SH, matrix_EH.T)


def _paired(weight: Tensor, size: int) -> Tensor:
    """A copy in which the two halves of each head take turns."""
    halves = weight.view(-1, 2, size // 2, *weight.shape[1:])
    return halves.transpose(1, 2).clone(memory_format=torch.contiguous_format).view(weight.shape)


def _parted(weight: Tensor, size: int) -> Tensor:
    """The halves one after the other again."""
    pairs = weight.view(-1, size // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _turned(states: Tensor, turn: Tensor) -> Tensor:
    """Each pair of numbers (S, heads, D) turned, in place."""
    torch.view_as_complex(states.view(*states.shape[:-1], -1, 2)).mul_(turn)
    return states


def _drawn(states: Tensor, at: Tensor | None) -> Tensor:
    """The rows at some places."""
    return states if at is None else states.index_select(0, at)


def _returned(by: Tensor, at: Tensor | None, rows: int) -> Tensor:
    """The gradient of the states that rows were drawn from."""
    return by if at is None else by.new_zeros(rows, *by.shape[1:]).index_add_(0, at, by)


def _by_head(states: Tensor) -> Tensor:
    """(S, heads, D) as (1, heads, S, D)."""
    return states.transpose(0, 1)[None]


def _flat(gathered: Tensor) -> Tensor:
    """(1, heads, S, D) as (S, E)."""
    return gathered[0].transpose(0, 1).flatten(1)
