"""The launcher: one small process per pool that starts and ends sandboxes for the supervisor.

The supervisor may be a large process with an event loop that must not stall; forking it, or moving a process between
control groups, would. So it asks this process, started once as `python -I -S -E launcher.py`, over one inherited
socket (SEQPACKET, JSON messages, one descriptor passed per start).

It lives in a mount namespace of its own (with a user namespace of its own for a plain user), in which each sandbox's
writable files get a size-limited tmpfs; a mount thus cannot outlive the process that made it. It watches the supervisor
through a pidfd: when that dies, by whatever signal, it ends, and with it every bubblewrap (`--die-with-parent`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

SERVER_CONTROL, SERVER_RULES = 3, 4
"""Where a sandbox's server finds its socket, and bubblewrap the system call filter."""
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 20
TAIL_BYTES = 2000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """mount(2)."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {kind} on {target}")


def enter_namespaces() -> None:
    """Get a private mount namespace; where that is not allowed directly, inside a new user namespace."""
    try:
        unshare(CLONE_NEWNS)
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    mount("none", "/", "", MS_REC | MS_PRIVATE, "")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


class Launcher:
    """The loop: requests from the supervisor, ends of sandboxes, the end of the supervisor."""

    def __init__(self, supervisor: int, control: int) -> None:
        """Serve descriptor `control` and watch process `supervisor`."""
        self.socket = socket.socket(fileno=control)
        self.control = control
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.watch = os.pidfd_open(supervisor)
        self.poll.register(self.watch, select.POLLIN)
        self.alive: dict[int, tuple[str, int, int, float]] = {}
        """pidfd -> name, process, descriptor of its stderr, when it expires."""

    def run(self) -> None:
        """Serve until the supervisor is gone."""
        while True:
            for descriptor, _ in self.poll.poll(self.patience()):
                if descriptor == self.watch or (descriptor == self.control and not self.receive()):
                    return
                if descriptor in self.alive:
                    self.ended(descriptor)
            self.expire()

    def patience(self) -> int | None:
        """Milliseconds until the next sandbox expires, at most an hour; None without one."""
        if not self.alive:
            return None
        first = min(expires for _, _, _, expires in self.alive.values())
        return max(0, min(3_600_000, int((first - time.monotonic()) * 1000) + 1))

    def end(self) -> None:
        """End all sandboxes."""
        for _, process, _, _ in self.alive.values():
            end_group(process)

    def expire(self) -> None:
        """Kill the sandboxes that are older than they may be: their supervisor may hang."""
        now = time.monotonic()
        for _, process, _, expires in self.alive.values():
            if expires <= now:
                end_group(process)

    def send(self, message: dict[str, Any]) -> None:
        """Tell the supervisor; nobody if it is gone, which the loop will see."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(json.dumps(message).encode())

    def receive(self) -> bool:
        """Act on one request; False if the supervisor is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, MESSAGE_BYTES, 1)
        except ConnectionError:
            return False
        if not data:
            return False
        request = json.loads(data)
        if request["op"] == "start":
            self.start(request, descriptors[0])
        elif request["op"] == "kill":
            for name, process, _, _ in self.alive.values():
                if name == request["name"]:
                    end_group(process)
        return True

    def start(self, request: dict[str, Any], control: int) -> None:
        """Fork one sandbox; `control` is its end of the supervisor's socket."""
        errors = os.memfd_create("stderr")
        own = os.getpid()
        try:
            process = os.fork()
            if process == 0:
                become(request, control, errors, own)
            descriptor = os.pidfd_open(process)
        except OSError as error:
            os.close(errors)
            self.send({"name": request["name"], "status": 1, "stderr": f"launcher: {error}"})
            return
        finally:
            os.close(control)
        expires = time.monotonic() + request["lifetime_s"]
        self.alive[descriptor] = (request["name"], process, errors, expires)
        self.poll.register(descriptor, select.POLLIN)

    def ended(self, descriptor: int) -> None:
        """Collect one sandbox and report."""
        name, process, errors, expires = self.alive.pop(descriptor)
        end_group(process)
        self.poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(process, 0)
        size = os.fstat(errors).st_size
        words = os.pread(errors, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode("utf-8", "replace")
        os.close(errors)
        if expires <= time.monotonic():
            words = "its lifetime (sandbox.lifetime_s) is over"
        self.send({"name": name, "status": status, "stderr": words})


def end_group(process: int) -> None:
    """SIGKILL to a bubblewrap that was not collected yet, and to what it forked and has no session of its own yet.

    A bubblewrap that dies in its first milliseconds leaves a child that waits for it for ever: this child is in its
    process group, but not yet bound to its life.
    """
    for kill in (os.killpg, os.kill):
        try:
            kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def become(request: dict[str, Any], control: int, errors: int, launcher: int) -> NoReturn:
    """In the child: promise to die with the launcher, enter the control groups, make the tmpfs, become bubblewrap."""
    try:
        _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        if os.getppid() != launcher:
            os._exit(1)
        os.setpgid(0, 0)
        os.dup2(errors, 2)
        for path in request["cgroups"]:
            _write(path, "0")
        unshare(CLONE_NEWNS)
        mount("tmpfs", request["upper"], "tmpfs", MS_NOSUID | MS_NODEV, request["options"])
        for name, mode in request["directories"]:
            os.mkdir(os.path.join(request["upper"], name))
            os.chmod(os.path.join(request["upper"], name), mode)
        for source, target in ((control, SERVER_CONTROL), (os.open(request["seccomp"], os.O_RDONLY), SERVER_RULES)):
            os.dup2(source, target)
            os.set_inheritable(target, True)
        argv: list[str] = request["argv"]
        os.execve(argv[0], argv, {})
    except OSError as error:
        os.write(2, f"launcher: {error}".encode())
    os._exit(1)


def main() -> None:
    """Arguments: the supervisor's process, and the descriptor of our end of its socket."""
    supervisor, control = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(control, False)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    launcher = Launcher(supervisor, control)
    try:
        enter_namespaces()
    except OSError as error:
        launcher.send({"ready": False, "errno": error.errno or errno.EPERM, "error": str(error.strerror)})
        return
    launcher.send({"ready": True})
    launcher.run()
    launcher.end()


if __name__ == "__main__":
    main()
