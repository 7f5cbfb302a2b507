"""Training by several processes with sharded weights: FSDP2 (`fully_shard`) over a device mesh, started by torchrun.

Each process holds a part of every weight, gradient and moment. All of them are given the same batch, each trains on its
share of the micro-batches, and gradients are added, never averaged: the denominators of the loss are those of the whole
batch, so any number of processes makes the update that one would make.

Deadlines: a collective that a process does not join ends in an error after `DEADLINE_S`; a process that dies closes its
connections, which ends the collectives of the others at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from deepswe.algorithms.packing import MicroBatch
from deepswe.errors import TrainingError, boundary
from deepswe.training.forward import TokenScorer, TokenScores, layers_of

T = TypeVar("T")

DEADLINE_S = 1800.0
"""Of a collective within an update, a save or a load: longer than the slowest micro-batch or checkpoint."""

_PASS = "score_tokens"
"""The model's method that runs the scorer, so that FSDP gathers and frees weights around it."""


def processes() -> int:
    """How many processes train together: what torchrun says, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes_here() -> int:
    """How many of them share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def open_shards(
    *, deadline_s: float = DEADLINE_S, bfloat16: bool = False, cpu_offload: bool = False
) -> Iterator[Shards]:
    """Join the other processes until the block ends.

    Args:
        deadline_s: of one collective.
        bfloat16: weights are gathered, and forward and backward passes computed, in bfloat16; the shards, the
            reduction of gradients and the optimiser stay in float32.
        cpu_offload: shards, gradients and the optimiser live in the CPU's memory, and the update is made there.

    Raises:
        TrainingError: they cannot be reached; torchrun sets where they are.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with boundary("training.sharded", TrainingError):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            timeout=timedelta(seconds=deadline_s),
            rank=rank(),
            world_size=processes(),
            store=None if "MASTER_ADDR" in os.environ else HashStore(),
        )
    try:
        mesh = init_device_mesh("cuda" if cuda else "cpu", (processes(),), mesh_dim_names=("shards",))
        yield Shards(mesh, bfloat16=bfloat16, cpu_offload=cpu_offload)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Shards:
    """The processes that train together, as one of them sees them.

    Attributes:
        mesh: one dimension, all processes.
        bfloat16, cpu_offload: as `open_shards` takes them.
    """

    mesh: DeviceMesh
    bfloat16: bool = False
    cpu_offload: bool = False

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return self.mesh.get_rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return self.mesh.size()

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        kind = self.mesh.device_type
        return torch.device(f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind)

    def share(self, items: Sequence[T], filler: Callable[[T], T]) -> list[T]:
        """This process's share: every one gets as many, since each micro-batch is a collective.

        Args:
            items: the same on every process, at least one; neighbours should cost about the same.
            filler: makes of an item one that costs little and changes nothing.
        """
        own = list(items[self.rank :: self.size])
        return own if len(own) == -(-len(items) // self.size) else [*own, filler(items[-1])]

    def add(self, values: Mapping[str, float], *, greatest: Collection[str] = ()) -> dict[str, float]:
        """The sums of values over the processes, or of those in `greatest` the largest; the same names on each."""
        names = sorted(values)
        sums = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        tops = sums.clone()
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=self.mesh.get_group())
        dist.all_reduce(tops, dist.ReduceOp.MAX, group=self.mesh.get_group())
        both = zip(names, sums.tolist(), tops.tolist(), strict=True)
        return {name: top if name in greatest else total for name, total, top in both}

    def agreed(self, value: T | None) -> T:
        """What process 0 has, on all of them."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.mesh.get_group(), device=self.device)
        return box[0]  # type: ignore[return-value]

    def shard(self, model: nn.Module, scorer: TokenScorer, *, full: Mapping[str, Tensor] | None = None) -> None:
        """Shard a causal LM in place, layer by layer, and run the scorer's pass as one forward pass of it.

        Args:
            model: on the CPU, or on the meta device where another process has the weights.
            scorer: of that model; made before.
            full: the whole weights, on process 0; they become the weights of all processes. None everywhere: each
                process has the same ones already.
        """
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.bfloat16 else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self.cpu_offload else OffloadPolicy()
        options: dict[str, Any] = {"mesh": self.mesh, "mp_policy": precision, "offload_policy": offload}
        held = {name: None if buffer.is_meta else buffer.cpu() for name, buffer in model.named_buffers()}
        buffers = {name: self.agreed(buffer) for name, buffer in held.items()}
        for layer in layers_of(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if any(parameter.is_meta for parameter in model.parameters()):
            model.to_empty(device="cpu" if self.cpu_offload else self.device)
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name].to(self.device)
        if self.agreed(full is not None):
            set_model_state_dict(
                model,
                dict(full or {}),
                options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
            )
        setattr(model, _PASS, MethodType(lambda _, batch: _own(scorer.forward(batch)), model))
        register_fsdp_forward_method(model, _PASS)
        scorer.run = getattr(model, _PASS)


class KeptWeights:
    """The weights that a sharded model had at some moment; they score in exchange for the present ones."""

    def __init__(self, model: nn.Module, scorer: TokenScorer) -> None:
        """Args:
        model: sharded; its trainable weights are kept as they are now.
        scorer: of that model.
        """
        self._model, self._scorer = model, scorer
        self.shards = {name: value.clone() for name, value in self._present().items()}
        """This process's shards of them, by name."""

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> TokenScores:
        """Score a micro-batch with the kept weights; no gradient."""
        self._exchange()
        try:
            return self._scorer(batch)
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, present in self._present().items():
            kept = self.shards[name]
            moved = present.clone()
            present.copy_(kept)
            kept.copy_(moved)

    def _present(self) -> dict[str, Tensor]:
        reshard(self._model)
        named = ((name, value.detach()) for name, value in self._model.named_parameters() if value.requires_grad)
        return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in named}


def reshard(model: nn.Module) -> None:
    """Free what a pass has gathered and left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _own(scores: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor | None, ...]:
    """The same, none a view, as FSDP wants the outputs on which it hangs its hooks."""
    return tuple(None if score is None else score.clone() for score in scores)


def whole(tensor: Tensor) -> Tensor:
    """A tensor without shards; a collective where it has some."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
