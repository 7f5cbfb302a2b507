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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin

_EXTENT_STEP = 16
"""Rows that are read together are read up to a multiple of this many positions."""
_CALL = 250_000
"""What a call of the attention kernel costs by itself, in bytes of keys and values that are read meanwhile."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The new tokens of one row: places `begin` to `end` of a pass, at positions from `start` on."""

    slot: int
    begin: int
    end: int
    start: int

    @property
    def count(self) -> int:
        """New tokens."""
        return self.end - self.begin

    @property
    def length(self) -> int:
        """Positions of the row that its last token sees, itself included."""
        return self.start + self.count


class _Run:
    """Rows that are attended at once, as if all had as many new tokens as the one with most, and as many positions as
    the longest; those between them, too, which have nothing new.

    Attributes:
        stretches: of the rows with new tokens, by slot, end to end.
        rows: of the storage, in all.
        count, longest: most new tokens, most positions.
        even: whether each of the rows has as many new tokens.
        places, slots: its new tokens in the pass, and its rows in the storage.
        extent: positions that are read of each row; of one alone, those it has.
    """

    def __init__(self, stretches: tuple[Stretch, ...]) -> None:
        first, last = stretches[0], stretches[-1]
        self.stretches = stretches
        self.rows = last.slot + 1 - first.slot
        self.count = max(s.count for s in stretches)
        self.longest = max(s.length for s in stretches)
        self.even = last.end - first.begin == self.count * self.rows
        self.places, self.slots = slice(first.begin, last.end), slice(first.slot, last.slot + 1)
        self.extent = self.longest if self.rows == 1 else -(-self.longest // _EXTENT_STEP) * _EXTENT_STEP

    def moved(self) -> _Run:
        """The same rows with one position more."""
        return _Run(tuple(replace(s, start=s.start + 1) for s in self.stretches))


class Pass:
    """T new tokens. Rows with a single one come first; these and the others each in the order of their slots.

    Attributes:
        tokens: T.
        longest: positions of the longest row.
        position_T: the position of each token in its row.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int]], *, windows: Sequence[int | None], device: Any) -> None:
        """Args:
        rows: (slot, position of the first new token, number of new tokens), in the order above.
        windows: how far back each layer looks; None is all the way.
        device: where the storage is.
        """
        self._windows, self._device = windows, device
        self._stretches, begin = list[Stretch](), 0
        for slot, start, count in rows:
            self._stretches.append(Stretch(slot, begin, begin + count, start))
            begin += count
        self.tokens = begin
        self.longest = max((s.length for s in self._stretches), default=0)
        self.only_singles = all(s.count == 1 for s in self._stretches)
        starts = [start + at for _, start, count in rows for at in range(count)]
        self.position_T = torch.tensor(starts, device=device)
        self._slot_T = torch.tensor([slot for slot, _, count in rows for _ in range(count)], device=device)
        self._runs: dict[tuple[int, int, int], list[_Run]] = {}
        self._index: dict[tuple[int, int], Tensor] = {}
        self._masks: dict[tuple[int, int, int | None, int, torch.dtype], Tensor | None] = {}
        self._orders: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._ends: Ends | None = None

    def ends(self) -> Ends:
        """Of a pass in which some row has several new tokens: the last one of each row."""
        if self._ends is None:
            last = sorted(self._stretches, key=lambda s: s.slot)
            place_E = torch.tensor([s.end - 1 for s in last], device=self._device)
            of_T = torch.zeros(self.tokens, dtype=torch.long, device=self._device)
            of_T[place_E] = torch.arange(len(last), device=self._device)
            rows = Pass([(s.slot, s.length - 1, 1) for s in last], windows=self._windows, device=self._device)
            self._ends = Ends(rows, place_E, of_T)
        return self._ends

    def advance(self) -> None:
        """The pass after this one over the same rows with a single new token each, with one token more."""
        self.position_T += 1
        self.longest += 1
        for index_N in self._index.values():
            index_N += 1
        for runs in self._runs.values():
            runs[:] = [run.moved() for run in runs]
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
        (_, heads, size), lanes = query_THD.shape, keys_RHCD.shape[1]
        if (heads, lanes, size) not in self._runs:
            self._runs[heads, lanes, size] = _runs(self._stretches, read=8 * lanes * size, computed=heads * size)
        made_THD = torch.empty_like(query_THD)
        for run in self._runs[heads, lanes, size]:
            # The query heads that share a key-value head stand where a sequence of queries would.
            query = self._laid_out(run, query_THD).view(run.rows, run.count, lanes, heads // lanes, size)
            query = query.permute(0, 2, 3, 1, 4).reshape(run.rows, lanes, -1, size)
            seen = self._mask(run, self._windows[layer], heads // lanes, query.dtype)
            gathered = scaled_dot_product_attention(
                query,
                keys_RHCD[run.slots, :, : run.extent],
                values_RHCD[run.slots, :, : run.extent],
                attn_mask=seen,
                is_causal=seen is None,
                scale=scale,
            )
            gathered = gathered.view(run.rows, lanes, heads // lanes, run.count, size).permute(0, 3, 1, 2, 4)
            made_THD[run.places] = self._taken_up(run, gathered.reshape(run.rows, run.count, heads, size))
        return made_THD

    def _mask(self, run: _Run, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """What each query sees; None where that is plainly all that is not behind it."""
        key = (run.places.start, run.places.stop, window, groups, dtype)
        if key not in self._masks:
            alone = run.stretches[0] if run.rows == 1 and run.count > 1 else None
            plain = alone and not alone.start and groups == 1 and (window is None or window >= alone.length)
            self._masks[key] = None if plain else self._seeing(run, window, groups, dtype)
        return self._masks[key]

    def _seeing(self, run: _Run, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        own_RN = self._laid_out(run, self.position_T)
        places_K = torch.arange(run.extent, device=self._device)
        hidden_RNK = places_K > own_RN[:, :, None]
        if window is not None:
            hidden_RNK |= places_K <= own_RN[:, :, None] - window
        if run.count > 1:  # a byte for each, since there may be many
            return hidden_RNK.logical_not_().repeat(1, groups, 1)[:, None]
        empty = torch.zeros(hidden_RNK.shape, dtype=dtype, device=self._device)
        return empty.masked_fill_(hidden_RNK, float("-inf")).repeat(1, groups, 1)[:, None]

    def _laid_out(self, run: _Run, given_T: Tensor) -> Tensor:
        """What there is of each of a run's new tokens, as (rows, count, ...); where a row has fewer, its last one
        stands in, and where it has none, that of the row before."""
        given = given_T[run.places] if run.even else given_T[self._order(run)[0]]
        return given.view(run.rows, run.count, *given_T.shape[1:])

    def _taken_up(self, run: _Run, made_RN: Tensor) -> Tensor:
        """The same of the new tokens alone, end to end."""
        made = made_RN.flatten(0, 1)
        return made if run.even else made[self._order(run)[1]]

    def _order(self, run: _Run) -> tuple[Tensor, Tensor]:
        """Of an uneven run: the token at each place as laid out, and the place of each token."""
        key = (run.places.start, run.places.stop)
        if key not in self._orders:
            tokens, places = list[int](), list[int]()
            for s in run.stretches:
                first = (s.slot - run.slots.start) * run.count
                tokens += tokens[-1:] * (first - len(tokens))
                tokens += [min(s.begin + number, s.end - 1) for number in range(run.count)]
                places += range(first, first + s.count)
            self._orders[key] = (
                torch.tensor(tokens, device=self._device),
                torch.tensor(places, device=self._device),
            )
        return self._orders[key]


class Ends(NamedTuple):
    """The last new token of each of E rows.

    Attributes:
        rows: a pass of them alone, by slot.
        place_E: where they are in the whole pass.
        of_T: for the last token of a row, which of them it is.
    """

    rows: Pass
    place_E: Tensor
    of_T: Tensor


def _runs(stretches: Sequence[Stretch], *, read: int, computed: int) -> list[_Run]:
    """Neighbours are put together where less is wasted by it than another call costs.

    Args:
        read: bytes of keys and values of one position.
        computed: what a query costs at one position, in bytes read meanwhile.
    """

    groups: list[list[Stretch]] = []
    count = longest = 0
    for s in stretches:
        most, far = max(count, s.count), max(longest, s.length)
        own = s.length * (read + computed * s.count)
        if groups and s.slot > groups[-1][-1].slot and (s.count > 1) == (count > 1):
            first, last = groups[-1][0].slot, groups[-1][-1].slot
            apart = (last + 1 - first) * longest * (read + computed * count) + own
            if (s.slot + 1 - first) * far * (read + computed * most) - apart <= _CALL:
                groups[-1].append(s)
                count, longest = most, far
                continue
        groups.append([s])
        count, longest = s.count, s.length
    return [_Run(tuple(group)) for group in groups]


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, each (R, H, C, D)."""

    def __init__(self, cache: RowCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the storage, for states (T, H, D)."""
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
        """As for no cache: masks are made here."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """None: rows have each their own."""
        return 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    def resize(self, rows: int, capacity: int) -> None:
        """Make room; what is there stays."""
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
        self.row_layers = [RowLayer(self) for _ in range(layers)]
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
