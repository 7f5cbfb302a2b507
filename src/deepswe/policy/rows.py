"""The key-value cache of many trajectories: one row each, written at a position of its own, active rows in front.

All rows have the same capacity, which doubles when the longest needs more. A pass runs over a contiguous range of
rows, so attention reads the storage in place: nothing is gathered or copied while the set of active rows stays.
Shapes: R rows, H key-value heads, C capacity, D head size, N rows in a pass, Q new tokens per row in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Window:
    """What one pass reads and writes: shared by all layers."""

    def __init__(self) -> None:
        self.rows = 0
        self.capacity = 0
        self.first = 0
        self.extent = 0
        self.positions_NQ = torch.zeros((0, 0), dtype=torch.long)
        self.valid_NQ: Tensor | None = None
        self._index: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    def aim(self, first: int, positions_NQ: Tensor, valid_NQ: Tensor | None, extent: int) -> None:
        self.first, self.positions_NQ, self.valid_NQ, self.extent = first, positions_NQ, valid_NQ, extent
        self._index.clear()
        self._kept.clear()

    def index(self, heads: int) -> Tensor:
        """Where the new entries go, in a layer's storage seen as (R * H * C, D)."""
        found = self._index.get(heads)
        if found is None:
            count = self.positions_NQ.shape[0]
            lanes = torch.arange(self.first * heads, (self.first + count) * heads, device=self.positions_NQ.device)
            index_NHQ = lanes.view(count, heads, 1) * self.capacity + self.positions_NQ[:, None, :]
            found = index_NHQ.reshape(-1)
            if self.valid_NQ is not None:
                kept = self.valid_NQ[:, None, :].expand_as(index_NHQ).reshape(-1).nonzero().view(-1)
                self._kept[heads] = kept
                found = found[kept]
            self._index[heads] = found
        return found

    def kept(self, heads: int) -> Tensor | None:
        """Which new entries are real, or None when all are."""
        return None if self.valid_NQ is None else self._kept[heads]


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, each (R, H, C, D)."""

    def __init__(self, window: _Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._window = window
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._empty(key_states)
        self.values = self._empty(value_states)
        self.is_initialized = True

    def _empty(self, states_NHQD: Tensor) -> Tensor:
        _, heads, _, size = states_NHQD.shape
        # Zeros, not garbage: a masked entry has weight 0, and 0 times a stray NaN would be NaN.
        return states_NHQD.new_zeros((self._window.rows, heads, self._window.capacity, size))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (N, H, Q, D) new states; return views (N, H, extent, D) of all states of these rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, storage_RHCD: Tensor, states_NHQD: Tensor) -> Tensor:
        window = self._window
        count, heads, new, size = states_NHQD.shape
        index = window.index(heads)
        flat = states_NHQD.reshape(count * heads * new, size)
        kept = window.kept(heads)
        storage_RHCD.view(-1, size).index_copy_(0, index, flat if kept is None else flat[kept])
        return storage_RHCD[window.first : window.first + count, :, : window.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.extent, 0

    def get_seq_length(self) -> int:
        return self._window.extent

    def get_max_length(self) -> int:
        return -1

    def move(self, sources: Tensor, targets: Tensor, used: int) -> None:
        for storage in (self.keys, self.values):
            storage[targets, :, :used] = storage[sources, :, :used]

    def resize(self, rows: int, capacity: int) -> None:
        self.keys = _grown(self.keys, rows, capacity)
        self.values = _grown(self.values, rows, capacity)


def _grown(storage_RHCD: Tensor, rows: int, capacity: int) -> Tensor:
    old_rows, heads, old_capacity, size = storage_RHCD.shape
    grown = storage_RHCD.new_zeros((rows, heads, capacity, size))
    grown[:old_rows, :, :old_capacity] = storage_RHCD
    return grown


class RowCache(Cache):
    """A `transformers` cache whose rows are trajectories.

    Args:
        layers: how many layers the model has.
    """

    def __init__(self, layers: int) -> None:
        self.window = _Window()
        self._row_layers = [_RowLayer(self.window) for _ in range(layers)]
        super().__init__(layers=list(self._row_layers))

    @property
    def rows(self) -> int:
        """Rows allocated."""
        return self.window.rows

    @property
    def capacity(self) -> int:
        """Positions per row."""
        return self.window.capacity

    @property
    def bytes_per_position(self) -> int:
        """Of one row, over all layers; 0 before the first pass."""
        storages = [s for layer in self._row_layers if layer.is_initialized for s in (layer.keys, layer.values)]
        return sum(storage.shape[1] * storage.shape[3] * storage.element_size() for storage in storages)

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for at least this many rows and positions; grows geometrically, keeps what is there."""
        window = self.window
        if rows <= window.rows and capacity <= window.capacity:
            return
        if rows > window.rows:
            rows = max(rows, window.rows + window.rows // 2)
        if capacity > window.capacity:
            capacity = -(-max(capacity, window.capacity + window.capacity // 2) // 64) * 64
        window.rows, window.capacity = max(rows, window.rows), max(capacity, window.capacity)
        for layer in self._row_layers:
            if layer.is_initialized:
                layer.resize(window.rows, window.capacity)

    def move(self, moves: Sequence[tuple[int, int]], used: int) -> None:
        """Copy the first `used` positions of rows, all (source, target) pairs at once."""
        if not moves or not used:
            return
        sources = torch.tensor([source for source, _ in moves])
        targets = torch.tensor([target for _, target in moves])
        for layer in self._row_layers:
            if layer.is_initialized:
                layer.move(sources, targets, used)
