"""The embedded backend: Linux namespaces as bubblewrap makes them, an overlay on a bounded tmpfs, one resident server.

`view` says what a sandbox sees, `launching` starts it, `walls` or bubblewrap itself closes it, `server` runs its
commands, `cgroups` and `seccomp` bound it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepswe.config import SandboxConfig
from deepswe.deadlines import Ticket, call_off, running_deadlines
from deepswe.errors import SandboxDied, SandboxStartError, SandboxUnavailable, SandboxUnsupported
from deepswe.sandbox.base import EXPIRES, Limits, SandboxRecord, SandboxSpec
from deepswe.sandbox.cgroups import Cgroups, Group
from deepswe.sandbox.journal import (
    FILE,
    Journal,
    base_directory,
    find_processes,
    pool_directories,
    read_records,
    reap_directories,
)
from deepswe.sandbox.launcher import BUBBLEWRAP, FORKED
from deepswe.sandbox.launching import LAUNCHER_GONE, Launcher, explain_refusal
from deepswe.sandbox.served import GRACE_S, Answer, ServedSandbox, Wire
from deepswe.sandbox.view import disk_mib, environment, prepare_host, view

_NAMESPACE_SIGNS = ("uid map", "new namespace", "No permissions to create")
"""What bubblewrap says where the machine, such as Ubuntu by AppArmor, forbids namespaces."""
READ_BYTES = 1 << 18
STOP_S = 1.0
"""How long a sandbox may take to end by itself before bubblewrap is killed."""


class _Stream:
    """Carries a wire over one end of a socket pair, by plain callbacks: a transport costs several times as much."""

    def __init__(self, ours: socket.socket, inbox: bytearray) -> None:
        """Take over a socket that does not block.

        Args:
            ours: the socket.
            inbox: what is read into; all streams of an event loop may share one, since nothing stays in it.
        """
        self.wire = Wire(self._send)
        self._socket = ours
        self._inbox = inbox
        self._outbox = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), self._readable)  # the selector would describe the socket itself in words

    def close(self) -> None:
        """End the connection, and with it the server. Later calls do nothing."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        if self._outbox:
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self.wire.lose("its server has ended")

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(self._inbox)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count:
            self.wire.feed(memoryview(self._inbox)[:count])
        if not count or self.wire.lost:
            self.close()

    def _send(self, data: bytes) -> None:
        if self._socket.fileno() < 0:
            return
        waiting = bool(self._outbox)
        self._outbox += data
        if not waiting:
            self._flush()
            if self._outbox:
                self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        self._flush()
        if not self._outbox:
            self._loop.remove_writer(self._socket.fileno())

    def _flush(self) -> None:
        """Send what the socket takes now. One that is broken takes all: its reader will see that it has ended."""
        try:
            while self._outbox:
                with memoryview(self._outbox) as view:
                    sent = self._socket.send(view)
                del self._outbox[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()


class BubblewrapSandbox(ServedSandbox):
    """One live sandbox; see `deepswe.sandbox.base.Sandbox`. Made by `SandboxPool.open`."""

    def __init__(
        self,
        name: str,
        spec: SandboxSpec,
        enforced: Mapping[str, str],
        launcher: Launcher,
        wire: Wire,
        ended: asyncio.Future[str],
    ) -> None:
        super().__init__(name, spec, environment(spec))
        self.enforced = enforced
        self._launcher = launcher
        self._wire = wire
        self._ended = ended

    async def _call(self, kind: int, fields: Sequence[bytes], timeout_s: float) -> Answer:
        try:
            answer = await self._wire.ask(kind, fields, timeout_s)
        except TimeoutError as error:
            self._launcher.kill(self.id)
            raise SandboxDied(f"sandbox {self.id} has not answered for {timeout_s:.0f} s; it is ended") from error
        if answer is None:
            words = self._ended.result() if self._ended.done() and not self._ended.cancelled() else ""
            raise self.death(words)
        return answer


@dataclass(slots=True)
class _Life:
    """What has to be undone for one sandbox."""

    name: str
    limits: Limits
    group: Group
    ended: asyncio.Future[str]
    stream: _Stream
    over: asyncio.Future[None] | None = None
    timer: Ticket | None = None


class Backend:
    """Starts and ends sandboxes. One per pool."""

    def __init__(self, directory: Path, way: str = FORKED) -> None:
        """Prepare `directory` (empty, ours) and start the launcher.

        Args:
            directory: for what sandboxes share.
            way: how the launcher starts them; by bubblewrap wherever the other does not work.

        Raises:
            SandboxUnavailable: this machine cannot run the backend.
        """
        self._host = prepare_host(directory)
        self._cgroups = Cgroups()
        self._cgroups.reap()
        self._launcher = self._open_launcher(way)
        self._journal = Journal(directory / FILE)
        self._lives: dict[str, _Life] = {}
        self._inbox = bytearray(READ_BYTES)

    def _open_launcher(self, way: str) -> Launcher:
        """The launcher, which tries its way in a control group as sandboxes have it; that is free again afterwards."""
        limits = Limits()
        try:
            group = self._cgroups.take(limits)
        except OSError:  # every start will say so
            return Launcher(self._host, way)
        self._cgroups.give(group, limits)
        try:
            return Launcher(self._host, way, group)
        except SandboxUnavailable:
            self._cgroups.clear()
            raise

    async def start(self, name: str, spec: SandboxSpec, timeout_s: float) -> BubblewrapSandbox:
        """Start one sandbox. However this ends, what is not returned is ended too.

        Raises:
            SandboxStartError: it did not start in time or ended at once.
        """
        if spec.image:
            raise SandboxUnsupported(f"image {spec.image!r}: bubblewrap has no images; use docker or kubernetes")
        shown = view(self._host, spec)
        try:
            group = self._cgroups.take(spec.limits)
        except OSError as error:
            raise SandboxStartError(f"no control group for sandbox {name}: {error}") from error
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._journal.began(name, spec.labels)
        stream = _Stream(ours, self._inbox)
        ended = self._launcher.start(name, shown, spec.limits, group, theirs, lifetime_of(spec))
        life = _Life(name, spec.limits, group, ended, stream)
        self._lives[name] = life
        try:
            if not await stream.wire.greeted(timeout_s):
                raise await self._failure(life, timeout_s)
        except BaseException:
            await self.stop(name)
            raise
        enforced = {
            "memory_mib": "rlimit (each process)",
            "pids": "rlimit",
            "cpus": "none",
            "disk_mib": f"tmpfs of {disk_mib(spec.limits)} MiB",
            "output_bytes": "server",
            "walls": self._launcher.way,
            **self._cgroups.enforced(),
        }
        return BubblewrapSandbox(name, spec, enforced, self._launcher, stream.wire, ended)

    async def _failure(self, life: _Life, timeout_s: float) -> SandboxStartError:
        await asyncio.wait((life.ended,), timeout=STOP_S)
        if life.ended.done():
            words = life.ended.result().strip() or "it ended at once"
            if any(sign in words for sign in _NAMESPACE_SIGNS):
                words = explain_refusal(words)
            return SandboxStartError(f"sandbox {life.name} did not start: {words}")
        return SandboxStartError(
            f"sandbox {life.name} did not start within {timeout_s} s; raise sandbox.start_timeout_s or lower the load"
        )

    async def stop(self, name: str) -> None:
        """End one sandbox and all in it, to the end even if the caller is cancelled. Ended ones are ignored."""
        life = self._lives.get(name)
        if life is None:
            return
        if life.over is None:
            loop = asyncio.get_running_loop()
            life.over = loop.create_future()
            life.timer = running_deadlines().set(STOP_S, self._hasten, life)
            life.stream.close()
            life.ended.add_done_callback(lambda _: self._settle(life))
        await asyncio.shield(life.over)

    def _hasten(self, life: _Life) -> None:
        """It does not end by itself."""
        self._launcher.kill(life.name)
        life.timer = running_deadlines().set(GRACE_S, self._settle, life)

    def _settle(self, life: _Life) -> None:
        """It has ended, or will not."""
        if life.over is None or life.timer is None or life.over.done():
            return
        call_off(life.timer)
        del self._lives[life.name]
        if life.ended.done() and life.ended.result() != LAUNCHER_GONE:
            self._cgroups.give(life.group, life.limits)
        try:
            self._journal.ended(life.name)
        except OSError as error:
            life.over.set_exception(error)
        else:
            life.over.set_result(None)

    async def close(self) -> None:
        """End every sandbox, then the launcher; remove the control groups."""
        if self._lives:
            await asyncio.wait([asyncio.ensure_future(self.stop(name)) for name in self._lives], timeout=2 * GRACE_S)
        self._stop_launcher()
        for _ in range(100):
            if self._cgroups.clear():
                return
            await asyncio.sleep(0.02)

    def abort(self) -> None:
        """End everything without waiting for it; a later pool removes the control groups that are left."""
        self._stop_launcher()
        self._cgroups.clear()

    def _stop_launcher(self) -> None:
        """End the launcher, and what it may have left where it was killed itself."""
        self._launcher.stop()
        for pid in find_processes(os.getuid(), self._host.directory.name.__eq__):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def open_backend(config: SandboxConfig, run: str, directory: Path) -> Backend:
    """See `deepswe.sandbox.backends`."""
    return Backend(directory, BUBBLEWRAP if config.walls == "bubblewrap" else FORKED)


async def list_sandboxes(config: SandboxConfig) -> list[SandboxRecord]:
    """The sandboxes of this user on this machine; see `deepswe.sandbox.backends.Registry`.

    Those of a dead owner have ended with it; what is left of them is for the reaper.
    """
    return [record for path in pool_directories(base_directory()) for record in read_records(path, "bubblewrap")]


async def reap(config: SandboxConfig) -> list[SandboxRecord]:
    """Remove what dead owners left; see `deepswe.sandbox.backends.Registry`.

    Expired sandboxes need no reaper here: the launcher ends them.
    """
    orphans = [record for record in await list_sandboxes(config) if record.state == "orphaned"]
    reap_directories(base_directory())
    Cgroups().reap()
    return orphans


def lifetime_of(spec: SandboxSpec) -> float:
    """Seconds until the sandbox expires; for ever without a label."""
    return float(spec.labels.get(EXPIRES, "inf")) - time.time()
