"""The synchronous half of the embedded engine: rows, passes through the model, sampling.

One pass an iteration: one token of every row that is being sampled, and what is new of those whose turn begins, up to
a budget. Rows stay where they are in the storage, and one whose beginning another has starts from a copy of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepswe.errors import PolicyError
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.decoder import make_decoder
from deepswe.policy.rows import Pass, RowCache

# A pass has at most so many tokens of rows with more than one.
_PASS_TOKENS = 2048
# A shorter common prefix is not worth a copy.
_LEAST_SHARED = 16

# Tokens whose weights are added up at once when one is drawn; a vocabulary up to the second is not cut.
_BLOCK, _AT_ONCE = 256, 1024

Finish = Literal["stop", "length", "timeout"]


def uniforms(seeds_N: np.ndarray[Any, Any], positions_N: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Random numbers in [0, 1), a pure function of seed and position (SplitMix64 finaliser, Steele et al. 2014).

    Args:
        seeds_N, positions_N: uint64 arrays.
    """
    mixed = _mix(_mix(seeds_N + np.uint64(0x9E3779B97F4A7C15)) ^ (positions_N * np.uint64(0xD1B54A32D192ED03)))
    return np.asarray((mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52)


def _mix(bits_N: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    bits_N = (bits_N ^ (bits_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits_N = (bits_N ^ (bits_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits_N ^ (bits_N >> np.uint64(31)))


def sample(
    logits_NV: Tensor, temperatures_N: np.ndarray[Any, Any], uniforms_N: np.ndarray[Any, Any]
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by the inverse of the cumulative distribution.

    Args:
        logits_NV: the model's logits, float32; they are used up.
        temperatures_N: 0 takes the most likely token, with its log-prob at temperature 1.
        uniforms_N: float64 in [0, 1).

    Returns:
        tokens (N, int64) and their log-probs (N, float32) under the distribution that was sampled from.
    """
    device, greedy_N = logits_NV.device, temperatures_N == 0
    divisors_N = np.where(greedy_N, 1.0, temperatures_N)
    if (divisors_N != 1).any():
        logits_NV.div_(torch.from_numpy(divisors_N.astype(np.float32)).to(device)[:, None])
    top_N1 = logits_NV.amax(-1, keepdim=True)
    weight_NV = logits_NV.sub_(top_N1).exp_()
    draw = _drawn_at_once if weight_NV.shape[1] <= _AT_ONCE else _drawn_in_blocks
    token_N1, whole_N1 = draw(weight_NV, torch.from_numpy(uniforms_N).to(device)[:, None])
    if greedy_N.any():
        of_G = torch.from_numpy(greedy_N.nonzero()[0]).to(device)
        token_N1[of_G] = weight_NV[of_G].argmax(-1, keepdim=True)
    logp_N1 = (weight_NV.gather(1, token_N1) / whole_N1).log()
    return token_N1[:, 0], logp_N1[:, 0].float()


def _drawn_at_once(weight_NV: Tensor, uniform_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The token (N, 1) at which the cumulative weight passes a share of the whole, and the whole."""
    upto_NV = weight_NV.cumsum(-1, dtype=torch.float64)
    whole_N1 = upto_NV[:, -1:]
    return _first_beyond(upto_NV, uniform_N1 * whole_N1), whole_N1


def _block_sums(weight_NV: Tensor) -> Tensor:
    """Sums (N, B, float64) of blocks of tokens; the last may be shorter."""
    blocks = weight_NV.shape[1] // _BLOCK
    even_NBC = weight_NV[:, : blocks * _BLOCK].view(len(weight_NV), blocks, _BLOCK)
    return torch.cat((even_NBC.sum(-1), weight_NV[:, blocks * _BLOCK :].sum(-1, keepdim=True)), dim=1).double()


def _drawn_in_blocks(weight_NV: Tensor, uniform_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The same: first a block of tokens, then one of it."""
    sum_NB = _block_sums(weight_NV)
    upto_NB = sum_NB.cumsum(-1)
    wanted_N1 = uniform_N1 * upto_NB[:, -1:]
    block_N1 = _first_beyond(upto_NB, wanted_N1)
    chosen_N1 = sum_NB.gather(1, block_N1)
    share_N1 = (wanted_N1 - upto_NB.gather(1, block_N1) + chosen_N1) / chosen_N1
    last = weight_NV.shape[1] - 1
    place_NC = block_N1 * _BLOCK + torch.arange(_BLOCK, device=weight_NV.device)
    inside_NC = weight_NV.gather(1, place_NC.clamp(max=last)).masked_fill_(place_NC > last, 0.0)
    upto_NC = inside_NC.cumsum(-1, dtype=torch.float64)
    token_N1 = block_N1 * _BLOCK + _first_beyond(upto_NC, share_N1 * upto_NC[:, -1:])
    return token_N1.clamp_(max=last), sum_NB.sum(-1, keepdim=True)


def _first_beyond(upto_NX: Tensor, wanted_N1: Tensor) -> Tensor:
    return torch.searchsorted(upto_NX, wanted_N1, right=True).clamp_(max=upto_NX.shape[1] - 1)


@dataclass(slots=True, eq=False)
class Request:
    """A turn that was asked for, and what was sampled of it so far."""

    name: str
    stream: list[int]
    sampling: Sampling
    limit: int
    deadline: float
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    cancelled: bool = False

    def sampled(self, token: int, logprob: float, version: int) -> None:
        """One more token, drawn under this version of the weights."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def complete(self, finish: Finish, version: int) -> Completion:
        """The turn as it is; `version` is the present one, for a turn without tokens."""
        first = self.versions[0][1] if self.versions else version
        return Completion(tuple(self.tokens), tuple(self.logprobs), finish, first, later=tuple(self.versions[1:]))


@dataclass(slots=True, eq=False)
class Row:
    """A trajectory known to the cache: `tokens[:cached]` have their keys and values in row `slot`.

    Where `source` is a row, the first `cached` positions are to be copied from it as soon as it has them.
    """

    name: str
    slot: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    version: int = 0
    used: int = 0
    request: Request | None = None
    source: Row | None = None


class Engine:
    """Rows and passes. Only one thread touches it.

    Attributes:
        active: rows whose turn is being sampled, by slot.
        vocabulary, context: of the model, in tokens.
    """

    def __init__(self, model: PreTrainedModel, *, autocast: torch.dtype | None, cache_bytes: int) -> None:
        """Raises:
        PolicyError: the model cannot be run.
        """
        self._model = model
        self._cache_bytes = cache_bytes
        config = model.config.get_text_config()
        self._layers: int = config.num_hidden_layers
        self._windows = _attention_windows(config)
        self._decode = make_decoder(model, autocast=autocast, windows=self._windows, layers=self._layers)
        self.device = next(model.parameters()).device
        self.vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        self.context: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.reset()

    def reset(self) -> None:
        """Forget every row and give the storage back."""
        self.active: list[Row] = []
        self._slots: list[Row | None] = []
        self._rows: dict[str, Row] = {}
        self._clock = 0
        self._cache = RowCache(self._layers)
        # The next pass, made anew by `_aim` whenever it is not the last one moved on by a token.
        self._pass: Pass | None = None
        self._rows_of_pass: list[tuple[Row, int]] = []
        self._sampled: list[Row] = []
        self._ids_T = torch.empty(0, dtype=torch.long)
        self._places_N = torch.empty(0, dtype=torch.long)
        self._temperatures_N = np.empty(0, dtype=np.float32)
        self._seeds_N = self._positions_np = np.empty(0, dtype=np.uint64)

    def renew(self) -> None:
        """The weights may have changed; rows that were computed under another version are told by it."""
        self._decode.renew()

    def known(self, name: str) -> list[int]:
        """The stream of a trajectory that has a row, as of its last turn, else nothing. Any thread may ask."""
        row = self._rows.get(name)
        return [] if row is None else row.tokens

    def forget(self, name: str) -> None:
        """Give up the row of a trajectory that is not active; unknown names are ignored."""
        row = self._rows.get(name)
        if row is not None and row.request is None:
            del self._rows[name]
            self._slots[row.slot] = None

    def admit(self, requests: Sequence[Request], version: int) -> None:
        """Make each request's row active, reusing what is cached of its stream or of a like one.

        After a change of version everything is computed anew, also of the rows that are active already.
        """
        self._clock += 1
        for row in self._rows.values():
            if row.version != version:
                row.cached, row.version, row.source = 0, version, None
        # Requests that have a row come first, so that none of them makes room for another.
        known_first = sorted(requests, key=lambda request: request.name not in self._rows)
        self.active += [self._row_for(request, version) for request in known_first]
        self.active.sort(key=attrgetter("slot"))
        self._share([row for row in self.active if not row.cached and row.source is None])
        self._copy_sources()
        self._pass = None

    def is_stale(self, version: int) -> bool:
        """Whether an active row was computed under another version."""
        return any(row.version != version for row in self.active)

    def drop(self, leaving: Sequence[Row]) -> None:
        """Park rows whose turn is over; what is cached of them stays."""
        gone = set(map(id, leaving))
        self.active = [row for row in self.active if id(row) not in gone]
        for row in self.active:
            if row.source is not None and id(row.source) in gone:
                # It leaves before it had all that was to be copied: what it has must do.
                row.cached = min(row.cached, 0 if row.source.source is not None else row.source.cached)
        for row in leaving:
            row.request = None
            if row.source is not None:
                row.source, row.cached = None, 0
        self._copy_sources()
        self._pass = None

    def step(self) -> None:
        """One pass: a token is drawn for each active row whose stream is then computed whole."""
        if self._pass is None:
            self._pass = self._aim()
        if self._model.training:
            self._model.eval()  # type: ignore[no-untyped-call]
        logits_NV = self._decode(self._ids_T, self._pass, self._cache, self._places_N)
        for row, count in self._rows_of_pass:
            row.cached += count
        waiting = any(row.source is not None for row in self.active)
        if self._sampled:
            drawn_N = self._draw(logits_NV)
        if waiting:
            self._copy_sources()
        if waiting or not self._pass.only_singles or len(self._sampled) < len(self.active):
            self._pass = None
            return
        # The same rows go on: all that changes is one token more of each.
        self._pass.advance()
        self._ids_T = drawn_N
        self._positions_np += np.uint64(1)
        self._cache.reserve(len(self._slots), max(len(row.tokens) for row in self.active) + 1)

    def _aim(self) -> Pass:
        """The pass over the active rows as they are: single tokens, then longer stretches, the shortest where not all
        fit."""
        single, longer = list[tuple[Row, int]](), list[tuple[Row, int]]()
        for row in self.active:
            if row.source is None:
                new = len(row.tokens) - row.cached
                (single if new == 1 else longer).append((row, new))
        chosen = _fitting(single, longer) if longer else single
        self._cache.reserve(len(self._slots), max(len(row.tokens) for row in self.active) + 1)
        places, ids = list[int](), list[int]()
        self._rows_of_pass, self._sampled = chosen, []
        for row, count in chosen:
            ids += row.tokens[row.cached : row.cached + count]
            if row.cached + count == len(row.tokens):
                places.append(len(ids) - 1)
                self._sampled.append(row)
        self._ids_T = torch.from_numpy(np.array(ids, np.int64)).to(self.device)
        self._places_N = torch.from_numpy(np.array(places or [0], np.int64)).to(self.device)
        asked = [row.request.sampling for row in self._sampled if row.request]
        self._temperatures_N = np.array([s.temperature for s in asked], np.float32)
        self._seeds_N = np.array([s.seed & 0xFFFFFFFFFFFFFFFF for s in asked], np.uint64)
        self._positions_np = np.array([len(row.tokens) - 1 for row in self._sampled], np.uint64)
        rows = [(row.slot, row.cached, count) for row, count in chosen]
        return Pass(rows, windows=self._windows, device=self.device)

    def _draw(self, logits_NV: Tensor) -> Tensor:
        uniforms_N = uniforms(self._seeds_N, self._positions_np)
        tokens_N, logp_N = sample(logits_NV, self._temperatures_N, uniforms_N)
        for row, token, logprob in zip(self._sampled, tokens_N.tolist(), logp_N.tolist(), strict=True):
            if logprob != logprob:
                raise PolicyError("the model's logits are not numbers (NaN); its weights have diverged")
            row.tokens.append(token)
            if row.request is not None:
                row.request.sampled(token, logprob, row.version)
        return tokens_N

    def _share(self, needy: Sequence[Row]) -> None:
        """Let rows with nothing cached start from the longest prefix that another row has or is about to have.

        In the lexicographic order of the streams, the longest common prefix with any earlier one is that with the one
        before. Attempts at one task share their whole prompt, tasks of one suite its head.
        """
        if not needy:
            return
        ready = {id(row): row.cached for row in self._rows.values() if row.cached and row.source is None}
        donors = [row for row in self._rows.values() if id(row) in ready]
        order = sorted([*donors, *needy], key=lambda row: (row.tokens, row.name))
        donor_after: list[Row | None] = [None] * len(order)
        for index in range(len(order) - 2, -1, -1):
            after = order[index + 1]
            donor_after[index] = after if id(after) in ready else donor_after[index + 1]
        for index, row in enumerate(order):
            if id(row) in ready:
                continue
            before, shared = None, 0
            if index:
                before = order[index - 1]
                shared = self._shared(before, row, ready)
                while before.source is not None and before.cached >= shared:
                    before = before.source
            after_row = donor_after[index]
            if after_row is not None and (more := self._shared(after_row, row, ready)) > shared:
                before, shared = after_row, more
            if before is not None and shared >= _LEAST_SHARED:
                row.source, row.cached = before, shared

    def _shared(self, source: Row, row: Row, ready: dict[int, int]) -> int:
        limit = min(ready.get(id(source), len(source.tokens)), len(row.tokens) - 1)
        return _common_prefix(source.tokens[:limit], row.tokens)

    def _copy_sources(self) -> None:
        """Copy the beginnings that are there by now."""
        copies = []
        for row in self.active:
            source = row.source
            if source is not None and source.source is None and source.cached >= row.cached:
                copies.append((source.slot, row.slot, row.cached))
                row.source = None
        if copies:
            self._cache.reserve(len(self._slots), max(count for _, _, count in copies))
            self._cache.copy(copies)

    def _row_for(self, request: Request, version: int) -> Row:
        row = self._rows.get(request.name)
        if row is None:
            row = self._rows[request.name] = Row(request.name, self._free_slot(), version=version)
            self._slots[row.slot] = row
        row.cached = min(_common_prefix(row.tokens[: row.cached], request.stream), len(request.stream) - 1)
        row.tokens, row.request, row.used = request.stream, request, self._clock
        return row

    def _free_slot(self) -> int:
        for slot, row in enumerate(self._slots):
            if row is None:
                return slot
        parked = [row for row in self._slots if row is not None and row.request is None]
        if (
            parked
            and self._cache.bytes_per_position * self._cache.capacity * (len(self._slots) + 1) > self._cache_bytes
        ):
            oldest = min(parked, key=lambda row: (row.used, row.name))
            self.forget(oldest.name)
            return oldest.slot
        self._slots.append(None)
        return len(self._slots) - 1


def _fitting(single: Sequence[tuple[Row, int]], longer: Sequence[tuple[Row, int]]) -> list[tuple[Row, int]]:
    """The rows of a pass, and how many of their new tokens: where not all fit, those with the fewest, and what fits of
    one more."""
    left, fit = _PASS_TOKENS, list[tuple[Row, int]]()
    for row, new in sorted(longer, key=itemgetter(1)):
        count = min(new, left)
        left -= count
        if count:
            fit.append((row, count))
    return sorted([*single, *fit], key=lambda pair: (pair[1] > 1, pair[0].slot))


def _attention_windows(config: Any) -> list[int | None]:
    """How far back each layer looks; None is all the way."""
    window = getattr(config, "sliding_window", None)
    kinds = list(getattr(config, "layer_types", None) or ())
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise PolicyError(
            f"the embedded engine knows no {', '.join(sorted(unknown))} layers (model type {config.model_type}); "
            "use a model with full or sliding attention, or another engine"
        )
    if not kinds:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _common_prefix(left: list[int], right: list[int]) -> int:
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(index for index in range(count) if left[index] != right[index])
