"""The embedded engine: continuous batching in process, over the very module that the learner trains.

One thread computes; the event loop goes on running sandboxes meanwhile. Each iteration admits waiting requests (a
ragged prefill of only what is new in their streams: keys and values of earlier turns are kept by trajectory) and then
decodes one token for every active row. Rows join and leave at any step.

Exactness first: a change of `version` makes all kept keys and values stale, so they are computed anew, also for turns
in flight. Random numbers depend on (seed, position in the stream) alone, never on who shares the batch.

With `deterministic=True` results do not depend on timing, to the last bit: see `EmbeddedPolicy.cohort`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepswe.errors import DeepsweError, PolicyError, boundary
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.rows import RowCache

# One prefill pass: at most so many tokens, so many per row, and so much more padding for one more row. A pass costs
# about as much by itself as _PADDING tokens do.
_PASS_TOKENS = 2048
_CHUNK = 512
_PADDING = 64
# Attention reads a multiple of this many positions.
_EXTENT_STEP = 16
# A shorter common prefix is not worth a copy.
_LEAST_SHARED = 16

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


def sample(logits_NV: Tensor, temperatures_N: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by the inverse of the cumulative distribution.

    Args:
        logits_NV: the model's logits.
        temperatures_N: 0 takes the most likely token, with its log-prob at temperature 1.
        uniforms_N: float64 in [0, 1).

    Returns:
        tokens (N, int64) and their log-probs (N, float32) under the distribution that was sampled from.
    """
    greedy_N = temperatures_N == 0
    logp_NV = torch.log_softmax(logits_NV.float() / temperatures_N.masked_fill(greedy_N, 1.0)[:, None], dim=-1)
    cumulative_NV = logp_NV.exp().cumsum(-1, dtype=torch.float64)
    targets_N1 = uniforms_N[:, None] * cumulative_NV[:, -1:]
    tokens_N1 = torch.searchsorted(cumulative_NV, targets_N1, right=True).clamp_(max=logits_NV.shape[-1] - 1)
    tokens_N1 = torch.where(greedy_N[:, None], logp_NV.argmax(-1, keepdim=True), tokens_N1)
    return tokens_N1[:, 0], logp_NV.gather(1, tokens_N1)[:, 0]


@dataclass(slots=True, eq=False)
class _Request:
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
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def complete(self, finish: Finish, version: int) -> Completion:
        first = self.versions[0][1] if self.versions else version
        return Completion(tuple(self.tokens), tuple(self.logprobs), finish, first, later=tuple(self.versions[1:]))


@dataclass(slots=True, eq=False)
class _Row:
    """A trajectory known to the cache: `tokens[:cached]` have their keys and values in row `slot`.

    While it waits for its prefill, `source` is the row whose first `cached` positions are copied into it first, and
    `level` counts how many prefills come before: the source's is one less.
    """

    name: str
    slot: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    version: int = 0
    used: int = 0
    request: _Request | None = None
    source: _Row | None = None
    level: int = 0


class _Engine:
    """The synchronous half: rows, passes through the model, sampling. Only the worker thread touches it."""

    def __init__(self, model: PreTrainedModel, *, autocast: torch.dtype | None, cache_bytes: int) -> None:
        self._model = model
        self._config = model.config.get_text_config()
        self._cache_bytes = cache_bytes
        self._autocast = autocast
        parameter = next(model.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        if self._cache_argument not in accepted or "position_ids" not in accepted:
            raise PolicyError(f"{type(model).__name__}.forward takes no cache and position_ids; use another model")
        self._keep_argument = "logits_to_keep" if "logits_to_keep" in accepted else None
        self._windows = _attention_windows(self._config)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        self.context: int = getattr(self._config, "max_position_embeddings", None) or 1 << 30
        self.active: list[_Row] = []
        self._slots: list[_Row | None] = []
        self._rows: dict[str, _Row] = {}
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        """Forget every row and give the storage back."""
        self.active = []
        self._slots = []
        self._rows = {}
        self._clock = 0
        self._cache = RowCache(self._config.num_hidden_layers)
        # The state of decoding, rebuilt by `_load` whenever the set of active rows has changed (`_dirty`).
        self._dirty = True
        self._longest = 0
        self._ids_N1 = self._positions_N1 = torch.empty((0, 1), dtype=torch.long)
        self._temperatures_N = torch.empty(0)
        self._seeds_N = self._positions_np = np.empty(0, dtype=np.uint64)

    def forget(self, name: str) -> None:
        """Give up the row of a trajectory that is not active; unknown names are ignored."""
        row = self._rows.get(name)
        if row is not None and row.request is None:
            del self._rows[name]
            self._slots[row.slot] = None

    def admit(self, requests: Sequence[_Request], version: int) -> list[_Row]:
        """Give each request a row behind the active ones, reusing what is cached of its stream or of a like one.

        Returns:
            the rows to prefill, side by side: those of the requests and, after a change of version, all active ones.
        """
        self._clock += 1
        kept, fresh = self.active, []
        if self.is_stale(version):
            kept, fresh = [], self.active
        for row in self._rows.values():
            if row.version != version:
                row.cached, row.version = 0, version
        # Requests that have a row come first, so that none of them makes room for another.
        known_first = sorted(requests, key=lambda request: request.name not in self._rows)
        fresh = [*fresh, *(self._row_for(request, version) for request in known_first)]
        self._share(kept, fresh)
        fresh.sort(key=lambda row: (row.level, len(row.tokens) - row.cached, row.name))
        self._arrange(kept, fresh)
        self.active = [*kept, *fresh]
        return fresh

    def is_stale(self, version: int) -> bool:
        """Whether an active row was computed under another version."""
        return any(row.version != version for row in self.active)

    def drop(self, leaving: Sequence[_Row]) -> None:
        """Park rows whose turn is over: the last rows take their places among the active ones."""
        for row in leaving:
            row.request = None
        gone = set(map(id, leaving))
        tail = [row for row in self.active if id(row) not in gone]
        kept = len(tail)
        front: list[_Row | None] = [None if id(row) in gone else row for row in self.active[:kept]]
        movers = iter([row for row in self.active[kept:] if id(row) not in gone])
        active = [row if row is not None else next(movers) for row in front]
        self._arrange(active, ())
        self.active = active

    def prefill(self, rows: Sequence[_Row]) -> None:
        """Compute what is new of each row and sample its next token. The rows are as `admit` returned them."""
        begin = 0
        while begin < len(rows):
            end = begin + 1
            longest = len(rows[begin].tokens) - rows[begin].cached
            while end < len(rows) and rows[end].level == rows[begin].level:
                longer = max(longest, len(rows[end].tokens) - rows[end].cached)
                padding = (longer - longest) * (end - begin)
                if padding > _PADDING or min(longer, _CHUNK) * (end - begin + 1) > _PASS_TOKENS:
                    break
                longest, end = longer, end + 1
            group = rows[begin:end]
            copies = [(row.source.slot, row.slot) for row in group if row.source is not None]
            self._cache.move(copies, max(row.cached for row in group))
            self._prefill_group(group, longest)
            begin = end
        for row in rows:
            row.source, row.level = None, 0
        self._dirty = True

    def decode(self) -> None:
        """One token for every active row; each of them has exactly one token that is not cached."""
        rows = self.active
        if self._dirty:
            self._load(rows)
        extent = self._extent(self._longest)
        self._cache.reserve(len(self._slots), extent)
        logits_NV = self._forward(self._ids_N1, self._positions_N1, None, 0, extent)
        self._ids_N1 = self._draw(logits_NV, rows, self._temperatures_N, self._seeds_N, self._positions_np)[:, None]
        self._positions_N1 += 1
        self._positions_np += np.uint64(1)
        self._longest += 1

    def settle(self) -> None:
        """Note what is cached of the active rows: all but the token sampled last."""
        for row in self.active:
            row.cached = len(row.tokens) - 1

    def _share(self, kept: Sequence[_Row], fresh: Sequence[_Row]) -> None:
        """Let rows with nothing cached start from the longest prefix that another row has or is about to have.

        In the lexicographic order of the streams, the longest common prefix with any earlier one is that with the one
        before. Attempts at one task share their whole prompt, tasks of one suite its head.
        """
        running = set(map(id, kept))
        ready = {
            id(row): len(row.tokens) - 1 if id(row) in running else row.cached
            for row in self._rows.values()
            if id(row) in running or row.cached
        }
        needy = [row for row in fresh if not row.cached]
        if not needy:
            return
        donors = [row for row in self._rows.values() if id(row) in ready]
        order = sorted([*donors, *needy], key=lambda row: (row.tokens, row.name))
        donor_after: list[_Row | None] = [None] * len(order)
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
                row.level = 0 if id(before) in ready else before.level + 1

    def _shared(self, source: _Row, row: _Row, ready: dict[int, int]) -> int:
        limit = min(ready.get(id(source), len(source.tokens)), len(row.tokens) - 1)
        return _common_prefix(source.tokens[:limit], row.tokens)

    def _row_for(self, request: _Request, version: int) -> _Row:
        row = self._rows.get(request.name)
        if row is None:
            row = self._rows[request.name] = _Row(request.name, self._free_slot(), version=version)
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

    def _arrange(self, active: Sequence[_Row], joining: Sequence[_Row]) -> None:
        """Put the active rows into the first slots in order, the joining ones behind them, any others behind those."""
        front = [*active, *joining]
        longest = max((len(row.tokens) for row in front), default=0)
        self._cache.reserve(len(self._slots), self._extent(longest + 1))
        placed = set(map(id, front))
        slots: list[_Row | None] = [*front, *[None] * (len(self._slots) - len(front))]
        homeless = []
        for row in self._slots:
            if row is not None and id(row) not in placed:
                if row.slot >= len(front):
                    slots[row.slot] = row
                else:
                    homeless.append(row)
        free = iter([slot for slot, row in enumerate(slots) if row is None])
        for row in homeless:
            slots[next(free)] = row
        running = set(map(id, active))
        moves, used = [], 0
        for slot, row in enumerate(slots):
            if row is not None and row.slot != slot:
                held = len(row.tokens) if id(row) in running else row.cached
                if held and row.source is None:
                    moves.append((row.slot, slot))
                    used = max(used, held)
                row.slot = slot
        self._slots = slots
        self._cache.move(moves, min(used, self._cache.capacity))
        self._dirty = True

    def _prefill_group(self, rows: Sequence[_Row], longest: int) -> None:
        # Queries are aligned to the right, so that the last column is each row's last token.
        starts = [len(row.tokens) - longest for row in rows]
        starts_N1 = torch.tensor(starts)[:, None]
        cached_N1 = torch.tensor([row.cached for row in rows])[:, None]
        first = rows[0].slot
        logits_NV = torch.empty(0)
        for begin in range(0, longest, _CHUNK):
            end = min(begin + _CHUNK, longest)
            positions_NQ = starts_N1 + torch.arange(begin, end)
            valid_NQ = positions_NQ >= cached_N1
            padded = not bool(valid_NQ.all())
            ids_NQ = torch.tensor(
                [_right_aligned(row, start + begin, start + end) for row, start in zip(rows, starts, strict=True)]
            )
            positions_NQ = positions_NQ.masked_fill_(~valid_NQ, 0) if padded else positions_NQ
            extent = self._extent(max(start + end for start in starts))
            logits_NV = self._forward(
                ids_NQ.to(self.device),
                positions_NQ.to(self.device),
                valid_NQ.to(self.device) if padded else None,
                first,
                extent,
            )
        self._draw(
            logits_NV,
            rows,
            self._temperatures(rows),
            _seeds(rows),
            np.array([len(row.tokens) - 1 for row in rows], dtype=np.uint64),
        )

    def _extent(self, longest: int) -> int:
        return -(-longest // _EXTENT_STEP) * _EXTENT_STEP

    def _load(self, rows: Sequence[_Row]) -> None:
        lengths = [len(row.tokens) for row in rows]
        self._longest = max(lengths)
        self._ids_N1 = torch.tensor([[row.tokens[-1]] for row in rows], device=self.device)
        self._positions_N1 = torch.tensor([[length - 1] for length in lengths], device=self.device)
        self._positions_np = np.array(lengths, dtype=np.uint64) - np.uint64(1)
        self._temperatures_N = self._temperatures(rows)
        self._seeds_N = _seeds(rows)
        self._dirty = False

    def _temperatures(self, rows: Sequence[_Row]) -> Tensor:
        values = [row.request.sampling.temperature if row.request else 1.0 for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _draw(
        self,
        logits_NV: Tensor,
        rows: Sequence[_Row],
        temperatures_N: Tensor,
        seeds_N: np.ndarray[Any, Any],
        positions_N: np.ndarray[Any, Any],
    ) -> Tensor:
        uniforms_N = torch.from_numpy(uniforms(seeds_N, positions_N)).to(self.device)
        tokens_N, logp_N = sample(logits_NV, temperatures_N, uniforms_N)
        for row, token, logprob in zip(rows, tokens_N.tolist(), logp_N.tolist(), strict=True):
            if logprob != logprob:
                raise PolicyError("the model's logits are not numbers (NaN); its weights have diverged")
            row.tokens.append(token)
            request = row.request
            if request is not None:
                request.sampled(token, logprob, row.version)
        return tokens_N

    def _forward(
        self, ids_NQ: Tensor, positions_NQ: Tensor, valid_NQ: Tensor | None, first: int, extent: int
    ) -> Tensor:
        """Logits (N, V) after the last column; keys and values of the valid columns go into the cache."""
        if self._model.training:
            self._model.eval()  # type: ignore[no-untyped-call]
        self._cache.window.aim(first, positions_NQ, valid_NQ, extent)
        options: dict[str, Any] = {self._cache_argument: self._cache}
        if self._keep_argument is not None:
            options[self._keep_argument] = 1
        with self._precision():
            output = self._model(
                input_ids=ids_NQ,
                attention_mask=self._masks(positions_NQ, extent),
                position_ids=positions_NQ,
                use_cache=True,
                **options,
            )
            logits: Tensor = output.logits
            return logits[:, -1].float()

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._autocast, cache_enabled=False)

    def _masks(self, positions_NQ: Tensor, extent: int) -> Any:
        places_K = torch.arange(extent, device=self.device)
        later_NQK = places_K > positions_NQ[:, :, None]

        def mask(window: int | None) -> Tensor:
            hidden_NQK = later_NQK
            if window is not None:
                hidden_NQK = later_NQK | (places_K <= positions_NQ[:, :, None] - window)
            dtype = self._autocast or self._dtype
            return torch.zeros(hidden_NQK.shape, dtype=dtype, device=self.device).masked_fill_(
                hidden_NQK, float("-inf")
            )[:, None]

        if isinstance(self._windows, dict):
            return {kind: mask(window) for kind, window in self._windows.items()}
        return mask(self._windows)


def _attention_windows(config: Any) -> dict[str, int | None] | int | None:
    """How far back each kind of layer looks: by kind where layers differ, else one number; None is all the way."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise PolicyError(
            f"the embedded engine knows no {', '.join(sorted(unknown))} layers (model type {config.model_type}); "
            "use a model with full or sliding attention, or another engine"
        )
    if not kinds:
        return window
    if "sliding_attention" in kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    return None


def _right_aligned(row: _Row, begin: int, end: int) -> list[int]:
    """The row's new tokens among positions begin..end, behind zeros for those that are no new ones."""
    new = row.tokens[max(row.cached, begin) : max(end, 0)]
    return [0] * (end - begin - len(new)) + new


def _seeds(rows: Sequence[_Row]) -> np.ndarray[Any, Any]:
    values = [(row.request.sampling.seed if row.request else 0) & 0xFFFFFFFFFFFFFFFF for row in rows]
    return np.array(values, dtype=np.uint64)


def _common_prefix(left: list[int], right: list[int]) -> int:
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(index for index in range(count) if left[index] != right[index])


class EmbeddedPolicy:
    """`Policy` over a causal LM of `transformers` in this process, which the learner may train between passes.

    The weights are shared, not copied. Whoever changes them does so inside ``async with policy.updating()`` (or
    ``with policy.paused()``), for the whole forward and backward too where that switches the module to training mode,
    and sets `version` there.

    Args:
        model: the causal LM. The engine puts it into eval mode before each pass.
        threads: threads of the computing thread's operators; 0 leaves torch's setting.
        deterministic: lock-step batches, see `cohort`.
        autocast: type of the forward pass where it differs from the weights' own.
        cache_bytes: above this, trajectories between turns lose their cache first (it is computed anew when needed).

    Raises:
        PolicyError: the engine cannot run this architecture.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        threads: int = 0,
        deterministic: bool = False,
        autocast: torch.dtype | None = None,
        cache_bytes: int = 4 << 30,
    ) -> None:
        self._engine = _Engine(model, autocast=autocast, cache_bytes=cache_bytes)
        self._threads, self._deterministic = threads, deterministic
        self._changed = threading.Condition()
        # Everything below is guarded by `_changed`.
        self._waiting: list[_Request] = []
        self._released: set[str] = set()
        self._live: set[str] = set()
        self._cohorts = 0
        self._start_afresh = False
        self._width = 0
        self._version = 0
        self._pauses = 0
        self._idle = True
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="deepswe-engine", daemon=True)
        self._worker.start()

    @property
    def version(self) -> int:
        """Number of weight updates so far. Setting another number makes all kept keys and values stale."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        with self._changed:
            self._version = value

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        """Sample one turn. Cancelling the call frees its place in the batch at the next step.

        A turn that an update of the weights interrupts goes on under the new ones, its cache computed anew: each
        log-prob is that of the weights which sampled the token, and the completion says where which version began.

        Raises:
            PolicyError: the stream is unusable, the engine failed or is closed, or (deterministic) no cohort is open.
        """
        request = self._check(trajectory, stream, sampling, timeout_s)
        with self._changed:
            if self._closed:
                raise PolicyError("the engine is closed; open a new EmbeddedPolicy")
            if self._deterministic and not self._cohorts:
                raise PolicyError(
                    f"trajectory {trajectory!r} belongs to no cohort; a deterministic engine needs "
                    "`async with policy.cohort(names)` around it"
                )
            if self._deterministic:
                self._live.add(trajectory)
            self._waiting.append(request)
            self._changed.notify_all()
        try:
            return await request.future
        finally:
            if not request.future.done() or request.future.cancelled():
                with self._changed:
                    request.cancelled = True
                    self._changed.notify_all()

    def _check(self, name: str, stream: Sequence[int], sampling: Sampling, timeout_s: float) -> _Request:
        tokens = list(stream)
        if not tokens or min(tokens) < 0 or max(tokens) >= self._engine.vocabulary:
            raise PolicyError(
                f"the stream of trajectory {name!r} ({len(tokens)} tokens) is empty or has ids outside 0.."
                f"{self._engine.vocabulary - 1}; render it with the model's own tokenizer"
            )
        room = self._engine.context - len(tokens)
        if room <= 0 or sampling.max_tokens <= 0 or sampling.temperature < 0:
            raise PolicyError(
                f"trajectory {name!r} cannot be continued: {len(tokens)} tokens of a context of "
                f"{self._engine.context}, max_tokens {sampling.max_tokens}, temperature {sampling.temperature}"
            )
        loop = asyncio.get_running_loop()
        return _Request(
            name=name,
            stream=tokens,
            sampling=sampling,
            limit=min(sampling.max_tokens, room),
            deadline=time.monotonic() + timeout_s,
            future=loop.create_future(),
            loop=loop,
        )

    async def release(self, trajectory: str) -> None:
        """The trajectory is over: its cache goes, and it leaves its cohort."""
        with self._changed:
            self._released.add(trajectory)
            self._live.discard(trajectory)
            self._changed.notify_all()

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        """Trajectories that run in lock-step (deterministic mode; otherwise they are only released at the end).

        The engine samples only when all live trajectories have asked (with `width`, that many of them), takes them in
        the order of their names and runs their turns to the end before it admits others. Together with scripts and
        environments that are deterministic, tokens and log-probs are then the same to the last bit in every run,
        whoever asked first; deadlines that strike are the exception. Each trajectory must ask or be released, else the
        others wait until their deadlines.
        """
        with self._changed:
            self._cohorts += 1
            self._live.update(names)
            self._width = width
        try:
            yield
        finally:
            with self._changed:
                self._cohorts -= 1
                self._start_afresh |= self._deterministic and not self._cohorts
                self._released.update(names)
                self._live.difference_update(names)
                self._changed.notify_all()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """No pass runs inside: ``async with policy.updating(): optimiser.step(); policy.version += 1``."""
        with self._changed:
            self._pauses += 1
        try:
            await asyncio.to_thread(self._wait_until_idle)
            yield
        finally:
            self._resume()

    async def publish(self, version: int) -> Mapping[str, float]:
        """The shared weights are those of `version` now; called inside `updating`. Nothing is measured."""
        self.version = version
        return {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """`updating` for code outside the event loop; blocks the calling thread for at most one pass."""
        with self._changed:
            self._pauses += 1
        try:
            self._wait_until_idle()
            yield
        finally:
            self._resume()

    def _wait_until_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._idle)

    def _resume(self) -> None:
        with self._changed:
            self._pauses -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; calls in flight get a PolicyError. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The worker thread.

    def _work(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            while self._await_work():
                try:
                    with boundary("policy.embedded", PolicyError), torch.inference_mode():
                        self._iterate()
                except DeepsweError as error:
                    self._fail_all(str(error))
        finally:
            with self._changed:
                self._closed = self._idle = True
                self._changed.notify_all()
            self._fail_all("the engine is closed")

    def _await_work(self) -> bool:
        """Wait until there is something to compute; False when the engine is closed."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            while not self._closed and (self._pauses or not self._has_work()):
                self._changed.wait(self._time_to_deadline())
            self._idle = False
            return not self._closed

    def _has_work(self) -> bool:
        now = time.monotonic()
        stale = any(request.cancelled or request.deadline <= now for request in self._waiting)
        return bool(self._engine.active) or stale or self._may_admit()

    def _may_admit(self) -> bool:
        if not self._deterministic:
            return bool(self._waiting)
        expected = min(self._width, len(self._live)) if self._width else len(self._live)
        return 0 < expected <= len(self._waiting)

    def _time_to_deadline(self) -> float | None:
        if self._pauses or not self._waiting:
            return None
        return max(min(request.deadline for request in self._waiting) - time.monotonic(), 0.0)

    def _iterate(self) -> None:
        """Admit, prefill, decode one step, let go."""
        engine = self._engine
        admitted, version = self._take_requests()
        if engine.is_stale(version):
            self._let_go(version)
        if admitted or engine.is_stale(version):
            engine.prefill(engine.admit(admitted, version))
            self._let_go(version)
        if engine.active:
            engine.decode()
            self._let_go(version)

    def _take_requests(self) -> tuple[list[_Request], int]:
        engine = self._engine
        with self._changed:
            now = time.monotonic()
            for request in self._waiting:
                if request.deadline <= now and not request.cancelled:
                    _deliver(request, request.complete("timeout", self._version))
            self._waiting = [r for r in self._waiting if not r.cancelled and r.deadline > now]
            admitted: list[_Request] = []
            if not self._deterministic or not engine.active:
                self._forget_released()
                if self._may_admit():
                    busy = {row.name for row in engine.active}
                    names: set[str] = set()
                    for request in self._waiting:
                        if request.name not in busy and request.name not in names:
                            names.add(request.name)
                            admitted.append(request)
                    admitted.sort(key=lambda request: request.name)
                    taken = set(map(id, admitted))
                    self._waiting = [request for request in self._waiting if id(request) not in taken]
            return admitted, self._version

    def _forget_released(self) -> None:
        active = {row.name for row in self._engine.active}
        for name in sorted(self._released - active):
            self._engine.forget(name)
        self._released &= active
        if self._start_afresh:
            # So that a cohort's numbers do not depend on those before it, not even through the shape of the storage.
            self._engine.reset()
            self._start_afresh = False

    def _let_go(self, version: int) -> None:
        """Answer the turns that are over and park their rows."""
        now = time.monotonic()
        over: list[tuple[_Row, _Request, Finish | None]] = []
        for row in self._engine.active:
            request = row.request
            assert request is not None
            if request.cancelled:
                over.append((row, request, None))
            elif request.tokens and request.tokens[-1] in request.sampling.stop_tokens:
                over.append((row, request, "stop"))
            elif len(request.tokens) >= request.limit:
                over.append((row, request, "length"))
            elif request.deadline <= now:
                over.append((row, request, "timeout"))
        if not over:
            return
        self._engine.settle()
        self._engine.drop([row for row, _, _ in over])
        for _, request, finish in over:
            if finish is not None:
                _deliver(request, request.complete(finish, version))

    def _fail_all(self, message: str) -> None:
        with self._changed:
            failed = [*self._waiting, *(row.request for row in self._engine.active if row.request is not None)]
            self._waiting = []
            self._engine.reset()
        for request in failed:
            _deliver(request, PolicyError(message))


def _deliver(request: _Request, result: Completion | PolicyError) -> None:
    def settle() -> None:
        if request.future.done():
            return
        if isinstance(result, Completion):
            request.future.set_result(result)
        else:
            request.future.set_exception(result)

    if not request.loop.is_closed():
        request.loop.call_soon_threadsafe(settle)
