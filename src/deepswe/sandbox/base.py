"""The sandbox protocol: what every backend offers to environments and to grading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

RUN, TASK, OWNER, EXPIRES = "run", "task", "owner", "expires"
"""Labels that the pool sets on every sandbox; OWNER is a tag of `deepswe.sandbox.owner`, EXPIRES seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use.

    Attributes:
        memory_mib: memory of all its processes and of its writable files together.
        disk_mib: its writable files.
        pids: processes and threads.
        cpus: cores, as a share of wall time.
        output_bytes: of each of stdout and stderr kept per command; the rest is dropped and counted.
    """

    memory_mib: int = 1024
    disk_mib: int = 256
    pids: int = 128
    cpus: float = 1.0
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Layer:
    """A read-only directory of the host, seen in the sandbox at `target`.

    Attributes:
        source: directory on the host; never written through the sandbox.
        target: absolute path in the sandbox.
        writable: True gives the sandbox a private copy-on-write view; what it writes goes when it does.
    """

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to start.

    Attributes:
        layers: directories to show. Without any writable layer at `workdir`, `workdir` is an empty private directory.
        workdir: where commands start.
        env: variables that every command sees, on top of the backend's small clean default.
        limits: what it may use.
        labels: for the owner and the reaper, such as {"run": ..., "task": ...}.
        image: container image that holds the system and, if the task says so, the repository; empty takes the
            backend's default. A backend without images refuses a spec that names one.
    """

    layers: tuple[Layer, ...] = ()
    workdir: str = "/testbed"
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    labels: Mapping[str, str] = field(default_factory=dict)
    image: str = ""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """One finished command, whatever its fate.

    Attributes:
        exit_code: as the command gave it; 128 + n when a signal n ended it (137 after a timeout).
        stdout, stderr: bytes kept, at most `Limits.output_bytes` each.
        stdout_dropped, stderr_dropped: bytes that were not kept.
        timed_out: the time limit ended it and everything that it had started.
        channel: what the command wrote to descriptor 3, when `channel=True`; never mixed with its output.
        wall_s: seconds it ran.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    timed_out: bool = False
    channel: bytes = b""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """A sandbox as `deepswe sandbox ls` and the reaper see it, from outside the process that owns it.

    Attributes:
        backend, name: which one.
        run, task: from its labels; empty where it has none.
        owner: the owner's tag.
        created, expires: seconds since 1970.
        state: what `deepswe.sandbox.owner.judge` makes of it.
    """

    backend: str
    name: str
    run: str
    task: str
    owner: str
    created: float
    expires: float
    state: Literal["live", "orphaned", "expired"]


class Sandbox(Protocol):
    """A live, isolated machine for one attempt or one grading. Opened by `open_sandbox`, which also ends it.

    Calls may overlap. Every call has a deadline of its own. After a timeout the sandbox stays usable.
    """

    @property
    def id(self) -> str:
        """Unique on this host."""

    @property
    def enforced(self) -> Mapping[str, str]:
        """The limits really in force: limit name -> how ("cgroup v1", "rlimit", "tmpfs", "none").

        Also `walls`: what built them, where a backend has more than one way.
        """

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        channel: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> ExecResult:
        """Run one command. A non-zero exit, a missing program (127) or a timeout is an `ExecResult`.

        Args:
            argv: program and arguments; no shell unless argv names one.
            timeout_s: seconds, after which it and all its descendants are killed.
            cwd: absolute directory; the spec's `workdir` if None. One that does not exist gives exit code 126.
            env: variables on top of the spec's.
            stdin: the whole standard input.
            channel: give the command a descriptor 3 whose bytes come back in `ExecResult.channel`.
            files: written before it is started, as `write_files` does, in the same request.

        Raises:
            OSError: of the first of the files that could not be written; the command was not started.
            SandboxError: the sandbox itself could not run the command.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """The bytes of a regular file, links followed inside the sandbox.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError: as the sandbox's kernel says.
            ValueError: it is larger than `max_bytes` or no regular file.
            SandboxError: the sandbox itself failed.
        """
        ...

    async def write_files(self, files: Mapping[str, bytes], *, executable: bool = False) -> None:
        """Write whole files, parents created, existing ones replaced through the same path.

        Raises:
            OSError: with the path and errno of the first file that could not be written (ENOSPC for a full disk).
            SandboxError: the sandbox itself failed.
        """
        ...

    async def list_names(self, path: str, *, depth: int, timeout_s: float) -> list[bytes]:
        """Names below a directory, relative to it, down to `depth` levels, directories with a slash; in no order.

        Hidden names and `__pycache__` are left out. Nothing for what is no directory. `CommandFiles` does it by `find`.

        Raises:
            SandboxError: the sandbox itself failed.
        """
        ...

    async def find_text(self, text: str, path: str, *, timeout_s: float) -> ExecResult:
        """Lines that hold `text` exactly, in a file or in all text files below a directory, as `grep -rHnIF --null`.

        `.git` and `__pycache__` are left out. `CommandFiles` does it by `grep`.

        Returns:
            stdout of rows `FILE NUL NUMBER:LINE`; exit code 1 if there is none, more if `path` cannot be read.

        Raises:
            SandboxError: the sandbox itself failed.
        """
        ...


class Backend(Protocol):
    """Starts and ends the sandboxes of one kind for one run, on one event loop. Only the pool calls it."""

    async def start(self, name: str, spec: SandboxSpec, timeout_s: float) -> Sandbox:
        """Start one sandbox. Cancelled or failed, it leaves nothing behind.

        Args:
            name: unique; a reaper that finds it elsewhere can tell its owner.
            spec: what to start.
            timeout_s: seconds until it must answer.

        Raises:
            SandboxUnsupported: the spec asks for what this backend cannot honour.
            SandboxStartError: it did not start; the message says why.
        """
        ...

    async def stop(self, name: str) -> None:
        """End one sandbox and all that it holds. Unknown names are ignored; a cancelled stop still ends it."""

    async def close(self) -> None:
        """End all sandboxes and the backend."""

    def abort(self) -> None:
        """The same without an event loop, for the last moment of a process; repeated calls do nothing."""
