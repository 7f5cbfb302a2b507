"""The supervisor's side of the launcher process (`deepswe.sandbox.launcher`), and why that may not start."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

from deepswe.errors import SandboxUnavailable
from deepswe.sandbox import launcher as launcher_program
from deepswe.sandbox.base import Limits
from deepswe.sandbox.cgroups import Group
from deepswe.sandbox.view import Host, View, disk_mib, interpreter

_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from deepswe.sandbox.launcher import main; main()"
LAUNCHER_GONE = "the sandbox launcher is gone; open a new pool"
_INODES_PER_MIB = 256
FOR_EVER_S = 1e9


class Launcher:
    """The supervisor's side of the launcher process. Belongs to one pool."""

    def __init__(self, host: Host, way: str = launcher_program.FORKED, group: Group | None = None) -> None:
        """Start the process and wait (some 50 ms) until it has its namespaces.

        Args:
            host: what the sandboxes share.
            way: how to start them, if it works here.
            group: an empty control group, to find out whether that works.

        Raises:
            SandboxUnavailable: this machine does not allow them.
        """
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: deque[tuple[bytes, socket.socket | None]] = deque()
        self._gone = False
        self._stuck = False
        self._inbox = bytearray(launcher_program.MESSAGE_BYTES)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        package = Path(launcher_program.__file__).parents[2]
        argv = [interpreter(), "-I", "-S", "-E", "-X", "utf8", "-c", _PROGRAM, str(package), f"{host.directory}/"]
        argv += [str(os.getpid()), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                argv,
                env={},
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.settimeout(20)
        try:
            trial = list(group.entrances) if group else []
            ours.sendall(json.dumps({"way": way, "host": _shared(host), "cgroups": trial}).encode())
            answer = json.loads(ours.recv(launcher_program.MESSAGE_BYTES) or b"{}")
        except (TimeoutError, ConnectionError):
            answer = {}
        ours.setblocking(False)
        if not answer.get("ready"):
            self.stop()
            raise SandboxUnavailable(explain_refusal(answer.get("error", "the launcher ended at once")))
        self.way = answer["way"] + (f" ({answer['why']})" if answer["why"] else "")
        """How sandboxes are started, and why if by bubblewrap."""

    def start(
        self, name: str, view: View, limits: Limits, group: Group, control: socket.socket, lifetime_s: float
    ) -> asyncio.Future[str]:
        """Ask for one sandbox and take over `control`, its end of the wire. The launcher ends it after `lifetime_s`.

        The future gives the last words of its stderr, when all of it has ended.
        """
        self._attach()
        size = disk_mib(limits)
        request = {
            "op": "start",
            "name": name,
            "lifetime_s": min(lifetime_s, FOR_EVER_S),
            "view": view.argv,
            "limits": _resource_limits(limits, group),
            "cgroups": list(group.entrances),
            "options": f"size={size}m,nr_inodes={size * _INODES_PER_MIB},mode=755",
            "directories": view.directories,
        }
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ends[name] = ended
        self._send(request, control)
        return ended

    def kill(self, name: str) -> None:
        """End one sandbox by force."""
        if name in self._ends:
            self._send({"op": "kill", "name": name}, None)

    def stop(self) -> None:
        """End the process and with it every sandbox."""
        self._detach()
        self._socket.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        self._lost()

    def _send(self, request: dict[str, Any], control: socket.socket | None) -> None:
        self._outbox.append((json.dumps(request).encode(), control))
        self._flush()

    def _flush(self) -> None:
        """Send what the launcher takes now; the rest when it has caught up."""
        while self._outbox and not self._gone:
            data, control = self._outbox[0]
            try:
                socket.send_fds(self._socket, [data], [control.fileno()] if control is not None else [])
            except BlockingIOError:
                if self._loop is not None and not self._stuck:
                    self._stuck = True
                    self._loop.add_writer(self._socket.fileno(), self._flush)
                return
            except OSError:
                self._gone = True
                break
            self._outbox.popleft()
            if control is not None:
                control.close()
        if self._gone:
            self._lost()
        elif self._loop is not None and self._stuck:
            self._stuck = False
            self._loop.remove_writer(self._socket.fileno())

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop and not self._gone:
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._readable)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._loop, self._stuck = None, False

    def _readable(self) -> None:
        while True:
            try:
                count = self._socket.recv_into(self._inbox)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if not count:
                self._lost()
                return
            message = json.loads(self._inbox[:count])
            ended = self._ends.pop(message["name"], None)
            if ended is not None and not ended.done():
                ended.set_result(message["stderr"])

    def _lost(self) -> None:
        """The launcher is gone, and so are its sandboxes: tell whoever waits for their ends."""
        self._gone = True
        self._detach()
        for _, control in self._outbox:
            if control is not None:
                control.close()
        self._outbox.clear()
        for ended in self._ends.values():
            if not ended.done() and not ended.get_loop().is_closed():
                ended.set_result(LAUNCHER_GONE)
        self._ends.clear()


_NAMESPACE_SETTINGS = (
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
)
"""Under /proc/sys: file, the value that forbids namespaces to plain users, the mend."""


def explain_refusal(error: str, settings: Path = Path("/proc/sys")) -> str:
    """One line that names the setting which forbids namespaces here, or the way around."""
    for name, forbidding, mend in _NAMESPACE_SETTINGS:
        try:
            value = (settings / name).read_text().strip()
        except OSError:
            continue
        if value == forbidding:
            return (
                f"this machine does not allow namespaces ({error}); as root: sysctl -w {mend}, or use another backend"
            )
    return (
        f"this machine does not allow namespaces ({error}); in a container start it with --privileged or "
        "--security-opt seccomp=unconfined --cap-add SYS_ADMIN, or use another sandbox backend"
    )


def _shared(host: Host) -> dict[str, Any]:
    """As the launcher's `Host`."""
    return {
        "bwrap": str(host.bwrap),
        "head": host.head,
        "tail": host.tail,
        "upper": str(host.upper),
        "template": str(host.template),
        "root": str(host.root),
        "rules": str(host.seccomp),
    }


def _resource_limits(limits: Limits, group: Group) -> list[str]:
    """Arguments of the server: the resource limits of all commands, instead of a control group where there is none."""
    wanted = {4: 0}  # no core files
    if not group.directories:
        wanted |= {9: limits.memory_mib << 20, 6: limits.pids}  # address space of each process, number of processes
    return [f"{number}={value}" for number, value in wanted.items()]
