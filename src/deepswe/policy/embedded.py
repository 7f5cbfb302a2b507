"""The embedded engine: continuous batching in process, over the very module that the learner trains.

One thread computes; the event loop goes on running sandboxes meanwhile. Each iteration admits waiting requests and
makes one pass through the model (`deepswe.policy.engine`): a token for every active turn, and what is new in the
streams of those that begin; keys and values of earlier turns are kept by trajectory. Rows join and leave at any step.

Exactness first: a change of `version` makes all kept keys and values stale, so they are computed anew, also for turns
in flight. Random numbers depend on (seed, position in the stream) alone, never on who shares the batch.

With `deterministic=True` results do not depend on timing, to the last bit: see `EmbeddedPolicy.cohort`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Self

import torch
from transformers import PreTrainedModel

from deepswe.errors import DeepsweError, PolicyError, boundary
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.engine import Engine, Finish, Request, Row

GATHER_S = 0.0005
"""Answers to a pass often come back as the next requests at once, from one event loop, one by one."""
CACHE = 4 << 30
"""Bytes of keys and values that are kept, where nobody says and no GPU sets it."""
CACHE_SHARE = 0.5
"""Of what is left on a GPU beside weights, gradients and moments; the learner's activations have the rest."""

SMALL = 1 << 19
"""Weights of a layer below which the threads of a pass of up to 64 tokens wait for each other longer than they gain."""


def useful_threads(model: PreTrainedModel, cores: int) -> int:
    """Threads that an engine over this model makes use of: all cores, or one where its layers are small."""
    outer = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[no-untyped-call]
    ends = {id(p) for end in outer if end is not None for p in end.parameters()}
    inner = sum(p.numel() for p in model.parameters() if id(p) not in ends)
    layers: int = model.config.get_text_config().num_hidden_layers
    return cores if inner >= SMALL * layers else 1


def cache_limit(wanted_gib: float, free: float | None) -> int:
    """Bytes of keys and values that an engine keeps between turns.

    Args:
        wanted_gib: `engine.cache_gib`; 0 leaves the choice.
        free: bytes that are left on the GPU for it and the activations, or None where no machine sets its size.
    """
    if wanted_gib:
        return int(wanted_gib * (1 << 30))
    return CACHE if free is None else int(CACHE_SHARE * max(0.0, free))


def free_memory(device: torch.device) -> int | None:
    """Bytes that a GPU has left for this process, with what torch keeps for later; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


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
        cache_bytes: int = CACHE,
    ) -> None:
        self.cache_bytes = cache_bytes
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes a context that the computing thread enters for each pass; to be set before the first."""
        self._engine = Engine(model, autocast=autocast, cache_bytes=cache_bytes)
        self._threads, self._deterministic = threads, deterministic
        self._changed = threading.Condition()
        # Everything below is guarded by `_changed`.
        self._waiting: list[Request] = []
        self._released: set[str] = set()
        self._live: set[str] = set()
        self._cohorts = 0
        self._start_afresh = False
        self._width = 0
        self._version = 0
        self._renew = True  # the engine was tried in this thread, and its own has other threads for its products
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
            self._renew = True

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

    def _check(self, name: str, stream: Sequence[int], sampling: Sampling, timeout_s: float) -> Request:
        tokens, known = list(stream), self._engine.known(name)
        count = len(known)  # tokens that were looked at before
        new = tokens[count:] if tokens[:count] == known else tokens
        if not tokens or (new and (min(new) < 0 or max(new) >= self._engine.vocabulary)):
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
        return Request(
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
            self._renew = True
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
                    with boundary("policy.embedded", PolicyError), torch.inference_mode(), self.computing():
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
            while True:
                while not self._closed and (self._pauses or not self._has_work()):
                    self._changed.wait(self._time_to_deadline())
                if self._closed or self._deterministic or self._engine.active:
                    break
                self._gather()
                if not self._pauses:  # which others may have asked for meanwhile
                    break
            self._idle = False
            return not self._closed

    def _gather(self) -> None:
        """Where nothing is being sampled, wait while requests come one right after another: they share a pass then."""
        count = 0
        while not self._closed and not self._pauses and len(self._waiting) > count:
            count = len(self._waiting)
            self._changed.wait(GATHER_S)

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
        """Admit, make one pass, let go."""
        engine = self._engine
        admitted, version = self._take_requests()
        if engine.is_stale(version):
            self._let_go(version)
        if admitted or engine.is_stale(version):
            engine.admit(admitted, version)
        if engine.active:
            engine.step()
            self._let_go(version)

    def _take_requests(self) -> tuple[list[Request], int]:
        engine = self._engine
        with self._changed:
            if self._renew:
                engine.renew()
                self._renew = False
            now = time.monotonic()
            late = [r for r in self._waiting if r.deadline <= now and not r.cancelled]
            _deliver([(request, request.complete("timeout", self._version)) for request in late])
            self._waiting = [r for r in self._waiting if not r.cancelled and r.deadline > now]
            admitted: list[Request] = []
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
        over: list[tuple[Row, Request, Finish | None]] = []
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
        self._engine.drop([row for row, _, _ in over])
        _deliver([(request, request.complete(finish, version)) for _, request, finish in over if finish is not None])

    def _fail_all(self, message: str) -> None:
        with self._changed:
            failed = [*self._waiting, *(row.request for row in self._engine.active if row.request is not None)]
            self._waiting = []
            self._engine.reset()
        _deliver([(request, PolicyError(message)) for request in failed])


Answer = tuple[Request, Completion | PolicyError]


def _deliver(answers: Sequence[Answer]) -> None:
    """Give answers to those who wait, each event loop woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].loop, []).append(answer)
    for loop, own in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, own)


def _settle(answers: Sequence[Answer]) -> None:
    for request, result in answers:
        if request.future.done():
            continue
        if isinstance(result, Completion):
            request.future.set_result(result)
        else:
            request.future.set_exception(result)
