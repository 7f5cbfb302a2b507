"""The launcher: one small process per pool that starts and ends sandboxes for the supervisor.

The supervisor may be a large process with an event loop that must not stall; forking it, or moving a process between
control groups, would. So it asks this process, started once as `python -I -S -E` with nothing but this module, over one
inherited socket (SEQPACKET, JSON messages, one descriptor passed per start).

A sandbox is started in one of two ways, chosen once (`choose`): by a clone of this process that builds the walls around
itself and goes on as the server (`walls`), or by bubblewrap, which starts an interpreter for the server. The first
needs no exec and no second interpreter; the second is the fallback.

It lives in a mount namespace of its own (with a user namespace of its own for a plain user), in which each sandbox's
writable files get a size-limited tmpfs; a mount thus cannot outlive the process that made it. It watches the supervisor
through a pidfd: when that dies, by whatever signal, it ends, and with it every sandbox (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NamedTuple, NoReturn

from deepswe.sandbox import server, syscalls, walls
from deepswe.sandbox.walls import Builder, write

SERVER_RULES = 4
"""Where bubblewrap finds the system call filter."""
FORKED, BUBBLEWRAP = "forked", "bubblewrap"
"""The two ways to start a sandbox."""
MESSAGE_BYTES = 1 << 20
TAIL_BYTES = 2000
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TITLE = "deepswe-sandbox-server"
"""Process 1 of a sandbox, as a list of processes shows it; the pool's directory follows."""


def enter_namespaces() -> None:
    """Get a private mount namespace; where that is not allowed directly, inside a new user namespace."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
    except PermissionError:
        uid, gid = os.getuid(), os.getgid()
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        proc = os.open("/proc", os.O_PATH)
        walls.map_ids(proc, uid, uid, gid, gid)
        os.close(proc)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE, "")


class Host(NamedTuple):
    """What all sandboxes share; see `deepswe.sandbox.view.Host`.

    Attributes:
        bwrap, head, tail: bubblewrap, and its arguments before and after those of a sandbox.
        upper, template, root: empty directories to mount on.
        rules: file of the system call filter.
        builder: starts sandboxes without bubblewrap; None if that does not work here.
    """

    bwrap: str
    head: list[str]
    tail: list[str]
    upper: str
    template: str
    root: str
    rules: str
    builder: Builder | None = None


class Launcher:
    """The loop: requests from the supervisor, ends of sandboxes, the end of the supervisor."""

    def __init__(self, supervisor: int, control: socket.socket, host: Host) -> None:
        """Serve `control` and watch process `supervisor`."""
        self.socket = control
        self.control = control.fileno()
        self.host = host
        self.poll = select.poll()
        self.poll.register(self.control, select.POLLIN)
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
        try:
            process = spawn(self.host, request, control, errors)
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


def spawn(host: Host, request: dict[str, Any], control: int, errors: int) -> int:
    """Start the process that will be, or will start, the sandbox's server; its id."""
    own = os.getpid()
    if host.builder is None:
        process = os.fork()
        if process == 0:
            become_bubblewrap(host, request, control, errors, own)
        return process
    process = syscalls.clone(walls.NAMESPACES)
    if process == 0:
        become_server(host.builder, request, control, errors, own)
    return process


def become_server(builder: Builder, request: dict[str, Any], control: int, errors: int, launcher: int) -> NoReturn:
    """In the child: build the walls around this process and serve. Whatever happens, it does not return."""
    words = ""
    try:
        os.dup2(errors, 2)
        os.dup2(control, server.CONTROL)
        default_signals()
        directories = dict(request["directories"])
        builder.enter(launcher, request["cgroups"], request["options"], directories, walls.read_steps(request["view"]))
        change_title(f"{TITLE} {os.path.dirname(builder.upper)}/".encode())
        import_nothing_more()
        if request["op"] == "start":
            server.serve(request["limits"])
        os._exit(0)
    except (OSError, walls.NotKnown) as error:
        words = str(error)
    finally:
        os.write(2, f"launcher: {words or repr(sys.exc_info()[1])}".encode())
        os._exit(1)


def become_bubblewrap(host: Host, request: dict[str, Any], control: int, errors: int, launcher: int) -> NoReturn:
    """In the child: promise to die with the launcher, enter the control groups, make the tmpfs, become bubblewrap."""
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)
        os.setpgid(0, 0)
        os.dup2(errors, 2)
        default_signals()
        for path in request["cgroups"]:
            write(path, "0")
        syscalls.unshare(syscalls.CLONE_NEWNS)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("tmpfs", host.upper, "tmpfs", flags, request["options"])
        for name, mode in request["directories"]:
            os.mkdir(os.path.join(host.upper, name))
            os.chmod(os.path.join(host.upper, name), mode)
        for source, target in ((control, server.CONTROL), (os.open(host.rules, os.O_RDONLY), SERVER_RULES)):
            os.dup2(source, target)
            os.set_inheritable(target, True)
        argv: list[str] = [host.bwrap, *host.head, *request["view"], *host.tail, *request["limits"]]
        os.execve(argv[0], argv, {})
    except OSError as error:
        os.write(2, f"launcher: {error}".encode())
    finally:
        os._exit(1)


def default_signals() -> None:
    """Signals as a program expects them; what the launcher ignores, its sandboxes' commands must not."""
    for name in IGNORED:
        signal.signal(name, signal.SIG_DFL)


def import_nothing_more() -> None:
    """What would be found on the path now are the sandbox's files; all that the server needs is loaded."""
    for places in (sys.path, sys.path_hooks, sys.meta_path):
        places.clear()
    sys.path_importer_cache.clear()


def change_title(title: bytes) -> None:
    """What `ps` shows of this process, without the launcher's arguments, which name paths of the host."""
    with open("/proc/self/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    start, end = int(words[45]), int(words[46])  # arg_start and arg_end, fields 48 and 49 of proc_pid_stat(5)
    if 0 < start < end:
        syscalls.overwrite(start, end - start, title)
    syscalls.name_process(title)


def choose(message: dict[str, Any]) -> tuple[Host, str]:
    """The one place that decides how sandboxes are started: forked where a trial of it succeeds.

    Returns:
        the host, and why it is bubblewrap; empty if it is not.
    """
    host = Host(**message["host"])
    if message["way"] == BUBBLEWRAP:
        return host, "sandbox.walls asks for it"
    try:
        plan = walls.read_plan(host.head)
        with open(host.rules, "rb") as file:
            rules = file.read()
        template = walls.Template(plan, host.template, host.upper)
        builder = Builder(plan, template, host.upper, host.root, rules, os.getuid(), os.getgid())
        forked = host._replace(builder=builder)
        words = attempt(forked, message["cgroups"])
    except (OSError, walls.NotKnown) as error:
        words = str(error)
    if not words:
        return forked, ""
    with contextlib.suppress(OSError):
        syscalls.unmount(host.template)
    return host, words


def attempt(host: Host, cgroups: list[str]) -> str:
    """Start a sandbox in some control groups that ends at once; why that failed, or nothing."""
    errors = os.memfd_create("stderr")
    request: dict[str, Any] = {"op": "try", "cgroups": cgroups, "view": [], "options": "mode=755,size=1m", "limits": []}
    request["directories"] = [("tmp", 0o1777), ("home", 0o755), ("shm", 0o1777)]
    try:
        _, status = os.waitpid(spawn(host, request, errors, errors), 0)
        words = os.pread(errors, TAIL_BYTES, 0).decode("utf-8", "replace")
    finally:
        os.close(errors)
    return words or ("" if status == 0 else f"status {status}")


def main() -> None:
    """Arguments: where this package is, the pool's directory, the supervisor's process, our end of its socket."""
    supervisor, control = int(sys.argv[3]), socket.socket(fileno=int(sys.argv[4]))
    os.set_inheritable(control.fileno(), False)
    os.umask(0o022)
    for name in IGNORED:
        signal.signal(name, signal.SIG_IGN)
    message = json.loads(control.recv(MESSAGE_BYTES) or b"{}")
    if not message:
        return
    try:
        enter_namespaces()
    except OSError as error:
        answer = {"ready": False, "errno": error.errno or errno.EPERM, "error": str(error.strerror)}
        control.sendall(json.dumps(answer).encode())
        return
    host, why = choose(message)
    gc.collect()
    gc.freeze()  # children share what they do not touch
    try:
        launcher = Launcher(supervisor, control, host)
    except ProcessLookupError:  # the supervisor is gone already
        return
    launcher.send({"ready": True, "way": FORKED if host.builder else BUBBLEWRAP, "why": why})
    launcher.run()
    launcher.end()
