"""What a training step would allocate, found without allocating it: the step runs on tensors that have no data.

The model is made in torch's fake mode, a micro-batch goes forward and backward through the very scorer that trains, and
each tensor's bytes are counted from its making to its release. Layers of one kind all cost the same, so two small
numbers of layers are run and the rest follows.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM, masking_utils

from deepswe.algorithms.packing import MicroBatch
from deepswe.config import LoraAdapters
from deepswe.policy.decoder import is_of_family
from deepswe.training.forward import TokenScorer, checkpoint_layers, layers_of
from deepswe.training.forward_family import Course, FamilyForward, course_of, serves
from deepswe.training.lora import matrices

FEW, MORE = 2, 3
"""Numbers of layers that are run; models with no more are run whole."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the planner must know of a model.

    Attributes:
        parameters: in all; tied ones count once.
        active: of these, those that one token goes through, the output matrix included.
        outer: those outside of the layers.
        layer: of the largest layer.
        matrices: those of the linear layers but the head, as (inputs, outputs).
        layers, hidden, vocabulary: sizes.
        attention: heads x their width.
        cache_values: keys and values of one token, in numbers.
        prepared: entries of the matrices of which the embedded engine keeps a copy laid out for its products.
    """

    parameters: int
    active: int
    outer: int
    layer: int
    matrices: tuple[tuple[int, int], ...]
    layers: int
    hidden: int
    vocabulary: int
    attention: int
    cache_values: int
    prepared: int = 0

    def lora(self, rank: int) -> int:
        """Parameters of adapters of this rank on every matrix."""
        return sum(rank * (inputs + outputs) for inputs, outputs in self.matrices)


def model_facts(config: Any) -> ModelFacts:
    """Read them off the model that a `transformers` configuration describes; nothing is allocated."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    total = sum(p.numel() for p in model.parameters())
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    head = model.get_output_embeddings()
    maps = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return ModelFacts(
        parameters=total,
        active=sum(layers) - _idle_experts(model, text) + text.vocab_size * text.hidden_size,
        outer=total - sum(layers),
        layer=max(layers),
        matrices=tuple((m.in_features, m.out_features) for m in maps if m is not head),
        layers=len(layers),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        attention=text.num_attention_heads * width,
        cache_values=2 * len(layers) * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * width,
        prepared=sum(m.weight.numel() for m in maps) if is_of_family(model) else 0,
    )


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one micro-batch beside weights, gradients and moments.

    Attributes:
        activations: kept by the decoder for its backward pass.
        rest: what lives beyond these at the highest point: logits, products on their way, casts.
    """

    activations: int
    rest: int


def step_memory(
    config: Any,
    *,
    rows: int,
    length: int,
    recompute: bool,
    autocast: bool,
    narrow: bool = False,
    lora: LoraAdapters | None = None,
    modules: bool = False,
) -> StepMemory:
    """The memory of one micro-batch of rows x length tokens, every token trained and as many different as can be.

    Args:
        config: a `transformers` configuration.
        rows, length: of the micro-batch.
        recompute: with activation checkpointing.
        autocast: forward passes under autocast to bfloat16.
        narrow: the weights themselves are in bfloat16, as FSDP gathers them.
        lora: the adapters that are trained, where not all weights are.
        modules: the pass is that of the model's modules whatever they are: on a GPU, or of shards. Else it is the one
            that training takes with them.
    """
    options: dict[str, Any] = {
        "rows": rows,
        "length": length,
        "recompute": recompute,
        "autocast": autocast,
        "narrow": narrow,
        "lora": lora,
        "modules": modules,
    }
    depth = config.get_text_config().num_hidden_layers
    if depth <= MORE:
        return _run(config, **options)
    few, more = (_run(_cut(config, layers), **options) for layers in (FEW, MORE))

    def extended(name: str) -> int:
        least, most = getattr(few, name), getattr(more, name)
        return int(least + (most - least) * (depth - FEW) / (MORE - FEW))

    return StepMemory(extended("activations"), max(0, extended("rest")))


def _cut(config: Any, layers: int) -> Any:
    short = copy.deepcopy(config)
    text = short.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types[:layers])
    return short


def _run(
    config: Any,
    *,
    rows: int,
    length: int,
    recompute: bool,
    autocast: bool,
    narrow: bool,
    lora: LoraAdapters | None,
    modules: bool,
) -> StepMemory:
    whole = _whole(rows, length, config.get_text_config().vocab_size)
    course = course_of(whole, torch.float32) if len(whole.row_N) and not modules else None
    with FakeTensorMode(), _one_sequence_a_row(), _counted() as live:
        kind = torch.bfloat16 if narrow else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=kind).eval()  # type: ignore[no-untyped-call]
        if lora is not None:
            _adapt(model, lora)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        if recompute:
            checkpoint_layers(model)
        scorer = TokenScorer(model, composed=True, own_pass=False)
        scorer.chunks = unlike_chunks
        tokens_BT = torch.zeros(rows, length, dtype=torch.int64)
        held = live.bytes
        live.top = held
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            if course is not None and serves(model):
                course = _blank(course)
                hidden_NH, targets_N = FamilyForward(model).along(course), course.target_N
            else:
                made = model.get_decoder()(input_ids=tokens_BT, use_cache=False)
                hidden_NH, targets_N = made.last_hidden_state.flatten(0, 1), tokens_BT.flatten()
                del made
            activations = live.bytes - held
            logp_N, _ = scorer.score_hidden(hidden_NH, targets_N)
            del hidden_NH  # whose states the backward pass lets go
        logp_N.sum().backward()  # type: ignore[no-untyped-call]
        return StepMemory(activations, max(0, live.top - held - activations))


def _whole(rows: int, length: int, vocabulary: int) -> MicroBatch:
    """A micro-batch of which all is trained that can be, with as many different tokens as can be."""
    tokens_BT = (torch.arange(rows * length) % vocabulary).view(rows, length)
    mask_BT = (torch.arange(length) > 0).expand(rows, length)
    none_N = torch.zeros(rows * (length - 1))
    return MicroBatch(tokens_BT, mask_BT, none_N, none_N, none_N.long(), none_N.long())


def _blank(course: Course) -> Course:
    """The same sizes, in tensors made here and now."""
    made: Course = tree_map_only(Tensor, lambda value: torch.zeros(value.shape, dtype=value.dtype), course)
    return made


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """What transformers reads off the positions of real tensors; with it no mask of length x length is made."""
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def unlike_chunks(count: int, rows: int) -> Iterable[int]:
    """The first, the second and the last: those between hold what the second does."""
    starts = range(0, count, rows)
    return sorted({*starts[:2], *starts[-1:]})


class _Adapted(nn.Module):
    """A frozen matrix with an adapter beside it, computed as peft does it, which cannot be put into a fake model."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """W x + B A x."""
        made: Tensor = self.base_layer(hidden)
        beside: Tensor = self.up(self.down(hidden.to(self.down.weight.dtype)))
        return (made + beside).to(made.dtype)


def _adapt(model: nn.Module, lora: LoraAdapters) -> None:
    """Freeze a model and put adapters beside its matrices, in place."""
    model.requires_grad_(False)
    targets = set(lora.targets or matrices(model))
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if isinstance(module, nn.Linear) and last in targets:
            setattr(model.get_submodule(parent), last, _Adapted(module, lora.rank))


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that exist, and the most that ever did."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.top = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.bytes += size
        self.top = max(self.top, self.bytes)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.bytes -= size


@contextmanager
def _counted() -> Iterator[_Live]:
    live = _Live()
    with live:
        yield live


def _idle_experts(model: nn.Module, text: Any) -> int:
    """Parameters of experts that one token does not go through; 0 for a dense model."""
    experts, chosen = getattr(text, "num_experts", None), getattr(text, "num_experts_per_tok", None)
    if not experts or not chosen:
        return 0
    held = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return int(held * (1 - chosen / experts))
