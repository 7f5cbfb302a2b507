"""The keys and values of many trajectories, one row each, and what one pass through the model reads and writes of them.

All rows have the same capacity, which grows when the longest needs more. A pass has the new tokens of several rows end
to end, without padding: one token of a row that is being sampled, many of one that has seen something new. Only
attention knows of rows; all else in a decoder works on each token alone. Nothing is gathered or moved: rows with one
new token that lie side by side are read in place, at once, those with more one by one.

Shapes: R rows, C capacity, H key-value heads, G query heads that share one, D head size, T tokens in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin

_EXTENT_STEP = 16
"""Rows that are read together are read up to a multiple of this many positions."""
_CALL = 250_000
"""What a call of the attention kernel costs by itself, in bytes of keys and values that are read meanwhile."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class _Stretches(NamedTuple):
    """The new tokens of S rows: places `begin` to `end` of a pass, up to position `length` of the row.

    All are arrays (S, int64).
    """

    slot_S: Numbers
    begin_S: Numbers
    end_S: Numbers
    length_S: Numbers


class _Run:
    """Rows that are attended at once, as if all had as many new tokens as the one with most, and as many positions as
    the longest; those between them, too, which have nothing new.

    Attributes:
        own: of the rows with new tokens, by slot, end to end.
        rows: of the storage, in all.
        count, longest: most new tokens, most positions.
        even: whether each of the rows has as many new tokens.
        places, slots: its new tokens in the pass, and its rows in the storage.
    """

    def __init__(self, own: _Stretches, count: int, longest: int) -> None:
        begin, end, first, last = int(own.begin_S[0]), int(own.end_S[-1]), int(own.slot_S[0]), int(own.slot_S[-1])
        self.own, self.count, self.longest = own, count, longest
        self.rows = last + 1 - first
        self.even = end - begin == count * self.rows
        self.places, self.slots = slice(begin, end), slice(first, last + 1)

    @property
    def extent(self) -> int:
        """Positions that are read of each row; of one alone, those it has."""
        return self.longest if self.rows == 1 else _rounded(self.longest)


class _Singles:
    """The rows with a single new token, which come first in a pass, as several runs.

    C rows are read, N of them with a new token. What a query sees of its row is kept from pass to pass.
    """

    def __init__(self, runs: Sequence[_Run], position_N: Tensor) -> None:
        self._runs, self._sizes = runs, [run.rows for run in runs]
        self.count = runs[-1].places.stop
        self._token_C: Tensor | None = None
        self._place_N: Tensor | None = None
        position_C = position_N.clone()
        if not all(run.even for run in runs):
            slot_N = np.concatenate([run.own.slot_S for run in runs])
            slot_C = np.concatenate([np.arange(run.slots.start, run.slots.stop) for run in runs])
            token_C = slot_N.searchsorted(slot_C, side="right") - 1
            self._token_C = torch.from_numpy(token_C).to(position_N.device)
            self._place_N = torch.from_numpy(slot_C.searchsorted(slot_N)).to(position_N.device)
            position_C = position_N.index_select(0, self._token_C)
        self._position_C1 = position_C[:, None]
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def advance(self) -> None:
        """One position on."""
        self._position_C1 += 1
        longest = 0
        for run in self._runs:
            run.longest += 1
            longest = max(longest, run.longest)
        for (window, kind), mask_C11P in list(self._masks.items()):
            if window is None and longest <= mask_C11P.shape[-1]:
                mask_C11P[:, 0, 0].scatter_(1, self._position_C1, 0.0)
            else:
                del self._masks[window, kind]

    def attend(
        self, query_NHD: Tensor, keys_RHCD: Tensor, values_RHCD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """What each token's heads gather (N, heads, D)."""
        rows = query_NHD if self._token_C is None else query_NHD.index_select(0, self._token_C)
        # The query heads that share a key-value head stand where a sequence of queries would.
        query = rows.reshape(len(rows), keys_RHCD.shape[1], -1, rows.shape[-1])
        queries = torch.split(query, self._sizes)
        masks = torch.split(self._mask(window, query.dtype), self._sizes)
        made = [
            scaled_dot_product_attention(
                own,
                keys_RHCD[run.slots, :, : run.extent],
                values_RHCD[run.slots, :, : run.extent],
                attn_mask=seen[..., : run.extent],
                scale=scale,
            )
            for run, own, seen in zip(self._runs, queries, masks, strict=True)
        ]
        gathered = (made[0] if len(made) == 1 else torch.cat(made)).reshape(rows.shape)
        return gathered if self._place_N is None else gathered.index_select(0, self._place_N)

    def _mask(self, window: int | None, kind: torch.dtype) -> Tensor:
        """What each query sees of a row, (C, 1, 1, positions)."""
        if (window, kind) not in self._masks:
            wide = _rounded(max(run.longest for run in self._runs) + _EXTENT_STEP)
            self._masks[window, kind] = _sights(self._position_C1[:, 0], wide, window, kind)[:, None, None]
        return self._masks[window, kind]


class Pass:
    """T new tokens. Rows with a single one come first; these and the others each in the order of their slots.

    Attributes:
        tokens: T.
        longest: positions of the longest row.
        only_singles: whether each row has a single one.
        position_T: the position of each token in its row.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int]], *, windows: Sequence[int | None], device: Any) -> None:
        """Args:
        rows: (slot, position of the first new token, number of new tokens), in the order above.
        windows: how far back each layer looks; None is all the way.
        device: where the storage is.
        """
        self._windows, self._device = windows, device
        slot_S, start_S, count_S = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, 3).T
        end_S = count_S.cumsum()
        begin_S = end_S - count_S
        self._stretches = _Stretches(slot_S, begin_S, end_S, start_S + count_S)
        self.tokens = int(count_S.sum())
        self.longest = int(self._stretches.length_S.max(initial=0))
        self.only_singles = self.tokens == len(count_S)
        self.position_T = self._tensor(np.arange(self.tokens) + (start_S - begin_S).repeat(count_S))
        self._slot_T = self._tensor(slot_S.repeat(count_S))
        self._ways: dict[tuple[int, int, int], _Way] = {}
        self._index: dict[tuple[int, int], Tensor] = {}
        self._orders: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._ends: Ends | None = None

    def _tensor(self, numbers: Numbers) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def ends(self) -> Ends:
        """Of a pass in which some row has several new tokens: the last one of each row."""
        if self._ends is None:
            slot_S, _, end_S, length_S = self._stretches
            order_E = slot_S.argsort()
            last_E = np.stack((slot_S, length_S - 1, np.ones_like(slot_S)), 1)[order_E]
            of_T = np.zeros(self.tokens, np.int64)
            of_T[end_S[order_E] - 1] = np.arange(len(order_E))
            rows = Pass(last_E.tolist(), windows=self._windows, device=self._device)
            self._ends = Ends(rows, self._tensor(end_S[order_E] - 1), self._tensor(of_T))
        return self._ends

    def advance(self) -> None:
        """The pass after this one over the same rows with a single new token each, with one token more."""
        self.position_T += 1
        self.longest += 1
        self._stretches = self._stretches._replace(length_S=self._stretches.length_S + 1)
        for index_N in self._index.values():
            index_N += 1
        for singles, _ in self._ways.values():
            if singles is not None:
                singles.advance()

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
        if (heads, lanes, size) not in self._ways:
            self._ways[heads, lanes, size] = self._way(read=8 * lanes * size, computed=heads * size)
        singles, longer = self._ways[heads, lanes, size]
        made, window = [], self._windows[layer]
        if singles is not None:
            own_NHD = query_THD if self.only_singles else query_THD[: singles.count]
            made.append(singles.attend(own_NHD, keys_RHCD, values_RHCD, scale, window))
        for run in longer:
            # The query heads that share a key-value head stand where a sequence of queries would.
            query = self._laid_out(run, query_THD).view(run.rows, run.count, lanes, heads // lanes, size)
            query = query.permute(0, 2, 3, 1, 4).reshape(run.rows, lanes, -1, size)
            seen = self._mask(run, window, heads // lanes, query.dtype)
            gathered = scaled_dot_product_attention(
                query,
                keys_RHCD[run.slots, :, : run.extent],
                values_RHCD[run.slots, :, : run.extent],
                attn_mask=seen,
                is_causal=seen is None,
                scale=scale,
            )
            gathered = gathered.view(run.rows, lanes, heads // lanes, run.count, size).permute(0, 3, 1, 2, 4)
            made.append(self._taken_up(run, gathered.reshape(run.rows, run.count, heads, size)))
        return made[0] if len(made) == 1 else torch.cat(made)

    def _way(self, *, read: int, computed: int) -> _Way:
        runs = _runs(self._stretches, read=read, computed=computed)
        short = [run for run in runs if run.count == 1]
        singles = _Singles(short, self.position_T[: short[-1].places.stop]) if short else None
        return _Way(singles, runs[len(short) :])

    def _mask(self, run: _Run, window: int | None, groups: int, kind: torch.dtype) -> Tensor | None:
        """What each query of a longer run sees; None where that is plainly all that is not behind it. It may be large,
        and is made for each layer."""
        whole = run.rows == 1 and run.count == run.longest
        if whole and groups == 1 and (window is None or window >= run.longest):
            return None
        own_RGN = self._laid_out(run, self.position_T)[:, None].expand(-1, groups, -1)
        return _sights(own_RGN.flatten(), run.extent, window, kind).view(run.rows, 1, -1, run.extent)

    def _laid_out(self, run: _Run, given_T: Tensor) -> Tensor:
        """What there is of each of a run's new tokens, as (rows, count, ...)."""
        given = given_T[run.places] if run.even else given_T.index_select(0, self._order(run)[0])
        return given.view(run.rows, run.count, *given_T.shape[1:])

    def _taken_up(self, run: _Run, made_RN: Tensor) -> Tensor:
        """The same of the new tokens alone, end to end."""
        made = made_RN.flatten(0, 1)
        return made if run.even else made.index_select(0, self._order(run)[1])

    def _order(self, run: _Run) -> tuple[Tensor, Tensor]:
        """Of an uneven run: the token at each place as laid out, and the place of each token. Where a row has fewer
        tokens, its last one stands in, and where it has none, that of the row before."""
        key = (run.places.start, run.places.stop)
        if key not in self._orders:
            slot_S, begin_S, end_S, _ = run.own
            first_S = (slot_S - slot_S[0]) * run.count
            place_T = np.arange(begin_S[0], end_S[-1]) + (first_S - begin_S).repeat(end_S - begin_S)
            slot_R = np.arange(run.slots.start, run.slots.stop)
            row_R = slot_S.searchsorted(slot_R, side="right") - 1  # the one with new tokens, at or before each
            token_R = np.where(slot_S[row_R] == slot_R, begin_S[row_R], end_S[row_R])
            token_RN = np.minimum(token_R[:, None] + np.arange(run.count), end_S[row_R, None] - 1)
            self._orders[key] = (self._tensor(token_RN.reshape(-1)), self._tensor(place_T))
        return self._orders[key]


class _Way(NamedTuple):
    """How a pass is attended."""

    singles: _Singles | None
    longer: list[_Run]


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


def _runs(stretches: _Stretches, *, read: int, computed: int) -> list[_Run]:
    """Neighbours are put together where less is wasted by it than another call costs.

    Args:
        stretches: of all rows of a pass.
        read: bytes of keys and values of one position.
        computed: what a query costs at one position, in bytes read meanwhile.
    """
    runs: list[tuple[int, int, int]] = []  # first stretch, most new tokens, most positions
    first = last = 0
    slot_S, begin_S, end_S, length_S = stretches
    rows = zip(slot_S.tolist(), (end_S - begin_S).tolist(), length_S.tolist(), strict=True)
    for number, (slot, new, length) in enumerate(rows):
        if runs:
            begin, count, longest = runs[-1]
            most, far = max(count, new), max(longest, length)
            own = length * (read + computed * new)
            apart = (last + 1 - first) * longest * (read + computed * count) + own
            joined = (slot + 1 - first) * far * (read + computed * most)
            if slot > last and (new > 1) == (count > 1) and joined - apart <= _CALL:
                runs[-1], last = (begin, most, far), slot
                continue
        runs.append((number, new, length))
        first = last = slot
    bounds = pairwise([*(begin for begin, _, _ in runs), len(slot_S)])
    return [
        _Run(_Stretches(*(each[begin:end] for each in stretches)), count, longest)
        for (begin, end), (_, count, longest) in zip(bounds, runs, strict=True)
    ]


def _rounded(positions: int) -> int:
    return -(-positions // _EXTENT_STEP) * _EXTENT_STEP


def _sights(position_Q: Tensor, extent: int, window: int | None, kind: torch.dtype) -> Tensor:
    """For each query (Q, extent): 0 where it sees a position, minus infinity elsewhere. All have the same sight, which
    moves with them."""
    sight = torch.full((2 * extent - 1,), float("-inf"), dtype=kind, device=position_Q.device)
    sight[0 if window is None else max(0, extent - window) : extent] = 0.0
    return sight.unfold(0, extent, 1).index_select(0, extent - 1 - position_Q)


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
