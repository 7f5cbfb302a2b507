"""The pool: who may open a sandbox when, and that each one opened is closed.

Every sandbox has one entry in the pool from before its start until after its end, and one owner and expiry in its
labels. An entry ends in one place, `_retire`, in a task of its own that no cancellation of a caller can stop; only then
is its place free again. So a start that is cancelled, at whatever moment, orphans nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from deepswe.config import SandboxConfig
from deepswe.cores import usable_cores
from deepswe.errors import ConfigError, SandboxError, SandboxStartError, SandboxUnavailable
from deepswe.memory import memory_gauge
from deepswe.sandbox.admission import (
    STARTS_PER_CORE,
    Admission,
    budget_of,
    choose_concurrency,
)
from deepswe.sandbox.backends import open_backend
from deepswe.sandbox.base import EXPIRES, OWNER, RUN, Backend, Limits, Sandbox, SandboxSpec
from deepswe.sandbox.journal import base_directory, reap_directories
from deepswe.sandbox.owner import PREFIX, this_process

KINDS = 4
"""Kinds of sandboxes, of those asked for last, of which warm ones are kept."""
STALE = 0.25
"""Share of its lifetime after which a warm sandbox is not handed out any more: whoever takes it needs the rest."""
THREADS = "OMP_NUM_THREADS"
"""What OpenMP, OpenBLAS and MKL take their threads from. They start one for each core of the host otherwise, whatever a
sandbox may use of them, until it has no process left. A task's own image keeps the environment that its tests know."""
PROBE_S = 15.0
"""How long a warm sandbox may take to show that it still lives."""
_LIMITS = ("memory_mib", "disk_mib", "pids", "cpus")

_pools = itertools.count(1)


def limits_of(config: SandboxConfig) -> Limits:
    """The limits that a recipe asks for."""
    return Limits(
        memory_mib=config.memory_mib,
        disk_mib=config.disk_mib,
        pids=config.pids,
        cpus=config.cpus,
        output_bytes=config.output_bytes,
    )


@dataclass(slots=True, eq=False)
class _Entry:
    """One sandbox from before its start until after its end."""

    name: str
    limits: Limits
    sandbox: Sandbox | None = None
    timer: asyncio.TimerHandle | None = None
    retiring: asyncio.Task[None] | None = None


class SandboxPool:
    """Sandboxes for one run, on one event loop. Ends all of them on `close`; a later pool reaps what a dead one left.

    A task that holds a sandbox and opens another can wait for ever once all are held by such tasks: close one first.
    """

    def __init__(self, config: SandboxConfig, run: str, backend: Backend | None = None) -> None:
        """Prepare the backend (some 100 ms).

        Args:
            config: the recipe's section.
            run: name of the run, part of every sandbox's id.
            backend: used in place of the one that `config` names.

        Raises:
            SandboxUnavailable: this machine cannot run the backend.
        """
        self.config = config
        self.run = run
        cores = usable_cores()
        gauge = memory_gauge()
        self.concurrency = choose_concurrency(config, cores, gauge())
        local = config.backend == "bubblewrap"
        self._admission = Admission(
            budget_of(config, self.concurrency),
            starts=STARTS_PER_CORE * cores if local else self.concurrency,
            starts_per_s=config.starts_per_s,
            free_mib=gauge if local else None,
        )
        self._numbers = itertools.count(1)
        self._closed = False
        self._entries: dict[str, _Entry] = {}
        self._warm: OrderedDict[tuple[Any, ...], list[_Entry]] = OrderedDict()
        self._refills: set[asyncio.Task[None]] = set()
        self._owner = this_process().tag
        self._number = next(_pools)
        base = base_directory()
        reap_directories(base)
        self._directory = base / f"{PREFIX}{self._owner}-{self._number}"
        self._directory.mkdir(mode=0o700)
        try:
            self._backend = backend or open_backend(config, run, self._directory)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    @property
    def alive(self) -> int:
        """Sandboxes that are starting, in use, kept warm or ending."""
        return len(self._entries)

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, *, timeout_s: float | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox for the length of the block; waits while too many are alive.

        Args:
            spec: what to start; without an image it gets the recipe's.
            timeout_s: until it is there, the wait included; the lifetime of a sandbox if None.

        Raises:
            SandboxStartError: it did not start, or not in time.
            SandboxError: the pool is closed.
        """
        entry = await self._obtain(self._complete(spec), timeout_s or self.config.lifetime_s)
        assert entry.sandbox is not None
        try:
            yield entry.sandbox
        finally:
            await self._end(entry)

    async def end(self, sandbox: Sandbox) -> None:
        """End one sandbox before its block does; calls on it then raise `SandboxDied`."""
        for entry in list(self._entries.values()):
            if entry.sandbox is sandbox:
                await self._end(entry)

    async def check(self, image: str = "") -> None:
        """Start one sandbox, run a command in it, end it: find out at load what would fail later.

        Args:
            image: of the sandbox; without one it gets the recipe's.

        Raises:
            SandboxUnavailable: that failed.
            ConfigError: the recipe sets a limit that is not enforced.
        """
        try:
            async with self.open(SandboxSpec(limits=limits_of(self.config), image=image)) as sandbox:
                result = await sandbox.exec(["true"], timeout_s=self.config.start_timeout_s)
        except SandboxError as error:
            raise SandboxUnavailable(f"no sandbox runs on this machine: {error}") from error
        if result.exit_code != 0:
            raise SandboxUnavailable(f"a command in a sandbox failed: {result.stderr.decode('utf-8', 'replace')}")
        for name in _LIMITS:
            if name in self.config.model_fields_set and sandbox.enforced.get(name, "none") == "none":
                raise ConfigError(
                    f"sandbox.{name} is {getattr(self.config, name)}, but {self.config.backend} enforces no such limit "
                    "here; leave it out of the recipe, or use another sandbox.backend"
                )

    async def close(self) -> None:
        """End every sandbox and remove all that the pool made. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._admission.close(f"the sandbox pool of run {self.run} was closed while waiting for a place")
        for refill in self._refills:
            refill.cancel()
        for entry in self._entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
        try:
            await self._backend.close()
        finally:
            self._backend.abort()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _complete(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec with what the pool knows: image, run, owner, expiry, and how many threads its cores are for."""
        expires = int(time.time() + self.config.lifetime_s)
        labels = {RUN: self.run, **spec.labels, OWNER: self._owner, EXPIRES: str(expires)}
        env = spec.env if spec.image else {THREADS: str(math.ceil(spec.limits.cpus)), **spec.env}
        return replace(spec, labels=labels, env=env, image=spec.image or self.config.image)

    async def _obtain(self, spec: SandboxSpec, timeout_s: float) -> _Entry:
        self._require_open()
        try:
            async with asyncio.timeout(timeout_s):
                entry = await self._take_warm(spec) or await self._fresh(spec)
        except TimeoutError as error:
            raise SandboxStartError(
                f"no sandbox within {timeout_s:.0f} s: {self.alive} of {self.concurrency} are alive; lower "
                "rollout.concurrency or raise sandbox.concurrency"
            ) from error
        self._keep_warm(spec)
        return entry

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxError(f"the sandbox pool of run {self.run} is closed; open a new one")

    # Starting and ending.

    async def _fresh(self, spec: SandboxSpec) -> _Entry:
        """Wait for a place and start a sandbox in it."""
        if not self._admission.fits(spec.limits):
            self._give_up_warm()
        await self._admission.enter(spec.limits)
        return await self._start(spec)

    async def _start(self, spec: SandboxSpec) -> _Entry:
        """Start a sandbox in a place that was taken; whatever is not returned is ended and its place given back."""
        entry = _Entry(f"{self.run}-{os.getpid()}-{self._number}-{next(self._numbers)}", spec.limits)
        self._entries[entry.name] = entry
        try:
            await self._admission.begin_start()
            try:
                self._require_open()
                entry.sandbox = await self._backend.start(entry.name, spec, self.config.start_timeout_s)
            finally:
                self._admission.end_start()
            self._require_open()
        except BaseException:
            await self._end(entry)
            raise
        entry.timer = asyncio.get_running_loop().call_later(self.config.lifetime_s, self._begin_end, entry)
        return entry

    def _begin_end(self, entry: _Entry) -> asyncio.Task[None]:
        if entry.retiring is None:
            entry.retiring = asyncio.get_running_loop().create_task(self._retire(entry))
        return entry.retiring

    async def _end(self, entry: _Entry) -> None:
        """End a sandbox, to the end even if the caller is cancelled meanwhile."""
        await asyncio.shield(self._begin_end(entry))

    async def _retire(self, entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        try:
            await self._backend.stop(entry.name)
        finally:
            del self._entries[entry.name]
            self._admission.leave(entry.limits)
            if self._admission.crowded:
                self._give_up_warm()

    # Warm sandboxes: started ahead, each in a place of its own, given up as soon as somebody waits for a place.

    async def _take_warm(self, spec: SandboxSpec) -> _Entry | None:
        """A warm sandbox of this kind that still answers."""
        waiting = self._warm.get(_kind(spec), [])
        while waiting:
            entry = waiting.pop()
            if entry.sandbox is None or entry.retiring is not None:
                continue
            if self._is_stale(entry):
                self._begin_end(entry)
                continue
            try:
                result = await entry.sandbox.exec(["true"], timeout_s=PROBE_S)
            except SandboxError:
                result = None
            except BaseException:
                await self._end(entry)
                raise
            if result is not None and result.exit_code == 0:
                return entry
            await self._end(entry)
        return None

    def _is_stale(self, entry: _Entry) -> bool:
        left = entry.timer.when() - asyncio.get_running_loop().time() if entry.timer is not None else 0.0
        return left < (1.0 - STALE) * self.config.lifetime_s

    def _keep_warm(self, spec: SandboxSpec) -> None:
        if not self.config.warm or self._closed:
            return
        kind = _kind(spec)
        self._warm.setdefault(kind, [])
        self._warm.move_to_end(kind)
        while len(self._warm) > KINDS:
            _, entries = self._warm.popitem(last=False)
            for entry in entries:
                self._begin_end(entry)
        refill = asyncio.get_running_loop().create_task(self._refill(kind, spec))
        self._refills.add(refill)
        refill.add_done_callback(self._refilled)

    async def _refill(self, kind: tuple[Any, ...], spec: SandboxSpec) -> None:
        while len(self._warm.get(kind, ())) < self.config.warm and self._admission.try_enter(spec.limits):
            entry = await self._start(self._complete(spec))
            if kind not in self._warm or len(self._warm[kind]) >= self.config.warm or self._admission.crowded:
                await self._end(entry)
                return
            self._warm[kind].append(entry)

    def _refilled(self, task: asyncio.Task[None]) -> None:
        self._refills.discard(task)
        if not task.cancelled():
            task.exception()  # a start ahead of time that fails is told when somebody asks for that kind

    def _give_up_warm(self) -> None:
        """End one warm sandbox, of the kind that was asked for longest ago."""
        for entries in self._warm.values():
            if entries:
                self._begin_end(entries.pop(0))
                return


def _kind(spec: SandboxSpec) -> tuple[Any, ...]:
    """What two specs must share for a sandbox of one to serve the other: all but the labels."""
    return spec.layers, spec.workdir, tuple(sorted(spec.env.items())), spec.limits, spec.image
