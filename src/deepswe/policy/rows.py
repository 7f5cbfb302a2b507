"""The keys and values of many trajectories, one row each, and what one pass through the model reads and writes of them.

All rows have the same capacity, which grows when the longest needs more. A pass has the new tokens of several rows end
to end, without padding: one token of a row that is being sampled, many of one that has seen something new. Only
attention knows of rows; all else in a decoder works on each token alone. Nothing is gathered or moved: rows with one
new token that lie side by side are read in place, at once, those with more one by one.

Shapes: R rows, C capacity, H key-value heads, G query heads that share one, D head size, T tokens in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin

_EXTENT_STEP = 16
"""Attention reads a multiple of this many positions."""
_RUN = 8
"""At most so many rows are read at once, all as far as the longest of them."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The new tokens of one row: places `begin` to `end` of a pass, at positions from `start` on."""

    slot: int
    begin: int
    end: int
    start: int

    @property
    def length(self) -> int:
        """Positions of the row that its last token sees, itself included."""
        return self.start + self.end - self.begin


class Pass:
    """T new tokens. Rows with a single one come first, in the order of their slots.

    Attributes:
        position_T: the position of each token in its row.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int]], *, windows: Sequence[int | None], device: Any) -> None:
        """Args:
        rows: (slot, position of the first new token, number of new tokens); single ones first, by slot.
        windows: how far back each layer looks; None is all the way.
        device: where the storage is.
        """
        self._windows, self._device = windows, device
        stretches, begin = [], 0
        for slot, start, count in rows:
            stretches.append(Stretch(slot, begin, begin + count, start))
            begin += count
        self.tokens = begin
        self._single_ends = [s.length for s in stretches if s.end - s.begin == 1]
        self._longer = [s for s in stretches if s.end - s.begin > 1]
        starts = [start + at for _, start, count in rows for at in range(count)]
        self.position_T = torch.tensor(starts, device=device)
        self._slot_T = torch.tensor([slot for slot, _, count in rows for _ in range(count)], device=device)
        self._runs = _runs(stretches[: len(self._single_ends)])
        self._index: dict[tuple[int, int], Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._seen: dict[tuple[int, int | None, int], Tensor | None] = {}

    @property
    def only_singles(self) -> bool:
        """Whether each row has one new token."""
        return not self._longer

    def advance(self) -> None:
        """The pass after this one over the same rows, each with one token more."""
        self.position_T += 1
        for index_N in self._index.values():
            index_N += 1
        self._single_ends = [end + 1 for end in self._single_ends]
        self._runs = [replace(run, longest=run.longest + 1) for run in self._runs]
        self._masks.clear()

    def index(self, heads: int, capacity: int) -> Tensor:
        """Where the new entries (T * H) go, in a layer's storage seen as (R * H * C, D)."""
        found = self._index.get((heads, capacity))
        if found is None:
            lanes_TH = self._slot_T[:, None] * heads + torch.arange(heads, device=self._device)
            found = (lanes_TH * capacity + self.position_T[:, None]).reshape(-1)
            self._index[heads, capacity] = found
        return found

    def attend(self, layer: int, query_THD: Tensor, keys_RHCD: Tensor, values_RHCD: Tensor, scale: float) -> Tensor:
        """What each token's heads gather (T, heads, D) from its row, up to itself."""
        window, lanes = self._windows[layer], keys_RHCD.shape[1]
        made_THD = torch.empty_like(query_THD)
        if self._runs:
            mask_T11K = self._mask(window, query_THD.dtype)
        for run in self._runs:
            query, extent = query_THD[run.begin : run.end], _extent(run.longest)
            rows = slice(run.slot, run.slot + run.end - run.begin)
            # The query heads that share a key-value head stand where a sequence of queries would.
            made_THD[run.begin : run.end] = scaled_dot_product_attention(
                query.view(len(query), lanes, -1, query.shape[2]),
                keys_RHCD[rows, :, :extent],
                values_RHCD[rows, :, :extent],
                attn_mask=mask_T11K[run.begin : run.end, :, :, :extent],
                scale=scale,
            ).view(query.shape)
        for s in self._longer:
            query = query_THD[s.begin : s.end]
            made_THD[s.begin : s.end] = self._of_row(s, query, keys_RHCD, values_RHCD, window, scale)
        return made_THD

    def _of_row(
        self, s: Stretch, query_NHD: Tensor, keys_RHCD: Tensor, values_RHCD: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """The same of several tokens of one row."""
        (count, heads, size), lanes = query_NHD.shape, keys_RHCD.shape[1]
        groups = heads // lanes
        seen = self._causal(s, window, groups)
        gathered = scaled_dot_product_attention(
            query_NHD.view(count, lanes, groups, size).permute(1, 2, 0, 3).reshape(1, lanes, groups * count, size),
            keys_RHCD[s.slot : s.slot + 1, :, : s.length],
            values_RHCD[s.slot : s.slot + 1, :, : s.length],
            attn_mask=seen,
            is_causal=seen is None,
            scale=scale,
        )
        return gathered.view(lanes, groups, count, size).permute(2, 0, 1, 3).reshape(count, heads, size)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Of the rows with one new token: minus infinity at the positions that it does not see."""
        key = (window, dtype)
        if key not in self._masks:
            own_T1 = self.position_T[: len(self._single_ends), None]
            places_K = torch.arange(_extent(max(self._single_ends)), device=self._device)
            hidden_TK = places_K > own_T1
            if window is not None:
                hidden_TK |= places_K <= own_T1 - window
            empty_TK = torch.zeros(hidden_TK.shape, dtype=dtype, device=self._device)
            self._masks[key] = empty_TK.masked_fill_(hidden_TK, float("-inf"))[:, None, None]
        return self._masks[key]

    def _causal(self, s: Stretch, window: int | None, groups: int) -> Tensor | None:
        """What each of several new tokens of a row sees; None where that is plainly all before it."""
        key = (s.begin, window, groups)
        if key not in self._seen:
            self._seen[key] = None
            if s.start or groups > 1 or (window is not None and window < s.length):
                own_N1 = torch.arange(s.start, s.length, device=self._device)[:, None]
                places_K = torch.arange(s.length, device=self._device)
                seen_NK = places_K <= own_N1
                if window is not None:
                    seen_NK &= places_K > own_N1 - window
                self._seen[key] = seen_NK.repeat(groups, 1)
        return self._seen[key]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows from `slot` on with one new token each, at places `begin` to `end`; the longest has so many positions."""

    slot: int
    begin: int
    end: int
    longest: int


def _runs(singles: Sequence[Stretch]) -> list[_Run]:
    """Rows that lie side by side."""
    runs: list[_Run] = []
    for s in singles:
        last = runs[-1] if runs else None
        if last is not None and last.end - last.begin < _RUN and s.slot == last.slot + last.end - last.begin:
            runs[-1] = _Run(last.slot, last.begin, s.end, max(last.longest, s.length))
        else:
            runs.append(_Run(s.slot, s.begin, s.end, s.length))
    return runs


def _extent(length: int) -> int:
    return -(-length // _EXTENT_STEP) * _EXTENT_STEP


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, each (R, H, C, D)."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def _empty(self, states_THD: Tensor) -> Tensor:
        _, heads, size = states_THD.shape
        # Zeros, not garbage: a masked entry has weight 0, and 0 times a stray NaN would be NaN.
        return states_THD.new_zeros((self._cache.rows, heads, self._cache.capacity, size))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (1, H, T, D) new states; return the storage of all rows."""
        self.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return self.keys, self.values

    def write(self, keys_THD: Tensor, values_THD: Tensor) -> None:
        """Put the new states of a pass where they belong."""
        if not self.is_initialized:
            self.lazy_initialization(keys_THD, values_THD)
        size = keys_THD.shape[2]
        index_N = self._cache.aimed.index(keys_THD.shape[1], self._cache.capacity)
        self.keys.view(-1, size).index_copy_(0, index_N, keys_THD.reshape(-1, size))
        self.values.view(-1, size).index_copy_(0, index_N, values_THD.reshape(-1, size))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

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

    Attributes:
        aimed: the pass that is being computed.
        rows, capacity: rows allocated, and positions of each.
        row_layers: the storage of each layer.
    """

    def __init__(self, layers: int) -> None:
        self.aimed = Pass((), windows=(), device="cpu")
        self.rows = self.capacity = 0
        self.row_layers = [_RowLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.row_layers))

    @property
    def bytes_per_position(self) -> int:
        """Of one row, over all layers; 0 before the first pass."""
        storages = [s for layer in self.row_layers if layer.is_initialized for s in (layer.keys, layer.values)]
        return sum(storage.shape[1] * storage.shape[3] * storage.element_size() for storage in storages)

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for at least this many rows and positions; grows geometrically, keeps what is there."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        if rows > self.rows:
            rows = max(rows, self.rows + self.rows // 2)
        if capacity > self.capacity:
            capacity = -(-max(capacity, 2 * self.capacity) // 64) * 64
        self.rows, self.capacity = max(rows, self.rows), max(capacity, self.capacity)
        for layer in self.row_layers:
            if layer.is_initialized:
                layer.resize(self.rows, self.capacity)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the beginnings of rows: (from, to, positions)."""
        for source, target, count in copies:
            for layer in self.row_layers:
                if layer.is_initialized:
                    layer.keys[target, :, :count] = layer.keys[source, :, :count]
                    layer.values[target, :, :count] = layer.values[source, :, :count]
