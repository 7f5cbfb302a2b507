"""Process 0 leads: it runs the loop, and each call of its learner is made by the learners of all processes together.

The others wait for orders. They hear from the leader at least once a minute; when they hear nothing for ten, or the
leader dies, they end with an error, and so does the leader when one of them does: torchrun then ends the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from deepswe.errors import TrainingError, boundary
from deepswe.training.checkpoint import Checkpoint
from deepswe.training.checkpoint_export import whole_weights
from deepswe.training.checkpoint_sharded import load_sharded, save_sharded
from deepswe.training.learner import Learner
from deepswe.training.sharded import Shards
from deepswe.types import Trajectory

BEAT_S, SILENCE_S = 60.0, 600.0
"""How often the leader says that it is there, and how long the others wait for a word."""

_END, _BEAT = "end", "beat"
Order = tuple[str, dict[str, Any]]


class Orders:
    """How process 0 tells the others what to do next; one at a time."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SILENCE_S))
        self._lock = threading.Lock()
        self._over = threading.Event()

    @contextmanager
    def given(self, name: str, **arguments: Any) -> Iterator[None]:
        """Tell the others to do this, and do it with them inside; nothing else is said meanwhile."""
        with self._lock:
            self._say((name, arguments))
            yield

    def take(self) -> Order:
        """The next order of process 0.

        Raises:
            TrainingError: it is dead, or silent.
        """
        box: list[Any] = [None]
        while box[0] is None or box[0][0] == _BEAT:
            with boundary("training.sharded: nothing is heard of process 0", TrainingError):
                dist.broadcast_object_list(box, src=0, group=self._group)
        order: Order = box[0]
        return order

    @contextmanager
    def led(self) -> Iterator[None]:
        """Process 0 leads until the block ends; then the others end, too."""
        beat = threading.Thread(target=self._beat, name="orders", daemon=True)
        beat.start()
        try:
            yield
        finally:
            self._over.set()
            beat.join()
            with self._lock, boundary("training.sharded: the other processes cannot be told to end", TrainingError):
                self._say((_END, {}))

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with self._lock:
                self._say((_BEAT, {}))

    def _say(self, order: Order) -> None:
        dist.broadcast_object_list([order], src=0, group=self._group)


class LeadingLearner(Learner):
    """The learner of process 0: whatever it does, all processes do."""

    def __init__(self, *arguments: Any, shards: Shards, orders: Orders, **options: Any) -> None:
        """Args: as of `Learner`; the others are made alike and follow the same orders."""
        super().__init__(*arguments, shards=shards, **options)
        self._team, self._orders = shards, orders

    def update(self, groups: Sequence[Sequence[Trajectory]], *, measure_start: bool = False) -> dict[str, float]:
        """As `Learner.update`."""
        plain = [list(group) for group in groups]
        with self._orders.given("update", groups=plain, measure_start=measure_start):
            return super().update(plain, measure_start=measure_start)

    def set_start(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """As `Learner.set_start`, of the present weights.

        Raises:
            TrainingError: of other weights, which one process alone cannot give to all.
        """
        if weights is not None:
            raise TrainingError("a learner over several processes keeps its present weights as the start of RL only")
        with self._orders.given("set_start"):
            super().set_start()

    def save(self, directory: Path, step: int, *, state: Mapping[str, Any], keep: int, tokenizer: Any) -> Checkpoint:
        """Write a checkpoint; as `save_sharded`."""
        with self._orders.given("save", directory=directory, step=step, state=dict(state), keep=keep):
            return save_sharded(
                directory, step, learner=self, shards=self._team, state=state, keep=keep, tokenizer=tokenizer
            )

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint; as `load_sharded`."""
        with self._orders.given("load", checkpoint=checkpoint):
            load_sharded(checkpoint, learner=self, shards=self._team)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight, whole, on the CPU, under the plain model's name: what an engine takes. Must be gone through."""
        with self._orders.given("weights"):
            yield from whole_weights(self.model)


def follow(learner: Learner, shards: Shards, orders: Orders) -> None:
    """Do what process 0 does, until it ends.

    Raises:
        TrainingError: what was done failed, or process 0 is dead or silent.
    """
    while True:
        name, arguments = orders.take()
        if name == _END:
            return
        _obey(name, arguments, learner, shards)


def _obey(name: str, arguments: dict[str, Any], learner: Learner, shards: Shards) -> None:
    if name == "update":
        learner.update(**arguments)
    elif name == "set_start":
        learner.set_start()
    elif name == "save":
        save_sharded(learner=learner, shards=shards, **arguments)
    elif name == "load":
        load_sharded(learner=learner, shards=shards, **arguments)
    elif name == "weights":
        for _ in whole_weights(learner.model):
            pass
    else:
        raise TrainingError(f"process 0 gave the order {name!r}, which this version does not know")
