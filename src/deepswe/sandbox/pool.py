"""The pool: who may open a sandbox when, and that each one opened is closed."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError, SandboxUnavailable
from deepswe.sandbox.backends import open_backend
from deepswe.sandbox.base import Limits, Sandbox, SandboxSpec
from deepswe.sandbox.owner import PREFIX, is_abandoned, this_process

TYPICAL_SHARE = 8
"""Most sandboxes use less than this fraction of their memory limit; the choice of concurrency counts on it."""
PER_CORE = 64

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


def choose_concurrency(config: SandboxConfig, cores: int, available_mib: int) -> int:
    """How many sandboxes may be alive at once: the recipe's number, or one that cores and memory allow."""
    if config.concurrency:
        return config.concurrency
    return max(1, min(PER_CORE * cores, available_mib * TYPICAL_SHARE // config.memory_mib))


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory_mib() -> int:
    """MemAvailable of this host; half of its memory where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 21
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable:")), 1024)


def require_backend(config: SandboxConfig) -> None:
    """Start one sandbox and end it, to find out at load what would fail later. Not inside a running event loop.

    Raises:
        SandboxUnavailable: with the setting to change, or the other way to go.
    """

    async def probe() -> None:
        async with SandboxPool(config, run="probe") as pool:
            await pool.check()

    asyncio.run(probe())


class SandboxPool:
    """Sandboxes for one run, on one event loop. Ends all of them on `close`; a later pool reaps what a dead one left.

    A task that holds a sandbox and opens another can wait for ever once all are held by such tasks: close one first.
    """

    def __init__(self, config: SandboxConfig, run: str) -> None:
        """Prepare the backend (some 100 ms).

        Args:
            config: the recipe's section.
            run: name of the run, part of every sandbox's id.

        Raises:
            SandboxUnavailable: this machine cannot run the backend.
        """
        self.config = config
        self.run = run
        self.concurrency = choose_concurrency(config, usable_cores(), available_memory_mib())
        self._places = asyncio.Semaphore(self.concurrency)
        self._numbers = itertools.count(1)
        self._closed = False
        self._number = next(_pools)
        base = _base_directory()
        reap_directories(base)
        self._directory = base / f"{PREFIX}{this_process().tag}-{self._number}"
        self._directory.mkdir(mode=0o700)
        try:
            self._backend = open_backend(config, run, self._directory)
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A sandbox for the length of the block; waits while too many are alive.

        Raises:
            SandboxStartError: it did not start.
            SandboxError: the pool is closed.
        """
        if self._closed:
            raise SandboxError(f"the sandbox pool of run {self.run} is closed; open a new one")
        async with self._places:
            name = f"{self.run}-{os.getpid()}-{self._number}-{next(self._numbers)}"
            if self._closed:
                raise SandboxError(f"the sandbox pool of run {self.run} was closed while waiting for a place")
            sandbox = await self._backend.start(name, spec, self.config.start_timeout_s)
            try:
                yield sandbox
            finally:
                await self._backend.stop(name)

    async def check(self) -> None:
        """Start one sandbox, run a command in it, end it.

        Raises:
            SandboxUnavailable: that failed.
        """
        try:
            async with self.open(SandboxSpec(limits=limits_of(self.config))) as sandbox:
                result = await sandbox.exec(["true"], timeout_s=self.config.start_timeout_s)
        except SandboxError as error:
            raise SandboxUnavailable(f"no sandbox runs on this machine: {error}") from error
        if result.exit_code != 0:
            raise SandboxUnavailable(f"a command in a sandbox failed: {result.stderr.decode('utf-8', 'replace')}")

    async def close(self) -> None:
        """End every sandbox and remove all that the pool made. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
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


def _base_directory() -> Path:
    """Where pools keep their few files: private to this user.

    Raises:
        SandboxUnavailable: somebody else owns it.
    """
    path = Path(tempfile.gettempdir()) / f"deepswe-sandboxes-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise SandboxUnavailable(f"{path} belongs to another user; set TMPDIR to a directory of your own")
    return path


def reap_directories(base: Path) -> int:
    """Remove the directories of pools whose owners are dead; returns how many."""
    count = 0
    for path in base.iterdir():
        if is_abandoned(path.name):
            shutil.rmtree(path, ignore_errors=True)
            count += 1
    return count
