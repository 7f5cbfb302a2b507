"""A live pod as a sandbox: the calls of the protocol, each one round trip of its session."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from deepswe.errors import SandboxError
from deepswe.sandbox import server
from deepswe.sandbox.base import ExecResult, SandboxSpec
from deepswe.sandbox.files import CommandFiles
from deepswe.sandbox.kubernetes.pods import HOME
from deepswe.sandbox.kubernetes.session import Answer, Session

FILE_TIMEOUT_S = 120.0
BATCH_BYTES = 4 << 20
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CLUSTER = ("KUBERNETES_", "HOSTNAME")
"""Variables that the cluster adds to a container and no command needs."""


class PodSandbox(CommandFiles):
    """One live pod; see `deepswe.sandbox.base.Sandbox`. Made by `SandboxPool.open`."""

    def __init__(self, name: str, spec: SandboxSpec, enforced: Mapping[str, str], session: Session) -> None:
        """Describe a pod with an open session.

        Args:
            name: the pod's.
            spec: what was asked for.
            enforced: limit -> how.
            session: open.
        """
        self.id = name
        self.enforced = enforced
        self._spec = spec
        self._session = session
        self._environment = environment(spec, session.image_environment)

    @property
    def sessions_opened(self) -> int:
        """How often the session was opened: 1 unless it broke."""
        return self._session.opened

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
        seen = {**self._environment, **(env or {})}
        if not argv or any("\0" in text for text in (*argv, *seen, *seen.values(), cwd or "")):
            raise SandboxError(f"cannot run {list(argv)!r}: give a program, and no NUL byte in any argument or value")
        fields = [server.number(max(1, int(timeout_s * 1000))), server.number(self._spec.limits.output_bytes)]
        fields += [b"1" if channel else b"0", _encode(cwd or self._spec.workdir), stdin, server.number(len(argv))]
        fields += [_encode(part) for part in argv]
        fields += [_encode(part) for item in seen.items() for part in item]
        kind, answer = await self._session.call(server.EXEC, fields, timeout_s)
        if kind != server.DONE or len(answer) != 8:
            words = b" ".join(answer).decode("utf-8", "replace")
            raise SandboxError(f"sandbox {self.id} could not run {argv[0]!r}: {words}")
        return _result(answer)

    async def read_file(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """The bytes of a regular file; see the protocol."""
        kind, answer = await self._ask(server.READ, [_absolute(path), server.number(max_bytes)])
        if kind == server.DATA and len(answer) == 1:
            return answer[0]
        raise self._file_error(answer)

    async def write_files(self, files: Mapping[str, bytes], *, executable: bool = False) -> None:
        """Write whole files; see the protocol."""
        flag = b"1" if executable else b"0"
        batch, size = [flag], 0
        for path, data in files.items():
            batch += [_absolute(path), data]
            size += len(data)
            if size >= BATCH_BYTES:
                await self._write(batch)
                batch, size = [flag], 0
        if len(batch) > 1:
            await self._write(batch)

    async def _write(self, batch: Sequence[bytes]) -> None:
        kind, answer = await self._ask(server.WRITE, batch)
        if kind != server.WRITTEN:
            raise self._file_error(answer)

    async def _ask(self, kind: int, fields: Sequence[bytes]) -> Answer:
        return await self._session.call(kind, fields, FILE_TIMEOUT_S)

    def _file_error(self, answer: Sequence[bytes]) -> Exception:
        if len(answer) != 3:
            return SandboxError(f"sandbox {self.id} gave an answer of {len(answer)} parts")
        code, path, text = int(answer[0]), os.fsdecode(answer[1]), answer[2].decode("utf-8", "replace")
        return OSError(code, text, path) if code else ValueError(f"{path} {text}")


def environment(spec: SandboxSpec, image: Mapping[str, str]) -> dict[str, str]:
    """What every command sees: a small default, over it the image's own variables, over these the spec's."""
    default = {
        "PATH": PATH,
        "HOME": HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    own = {name: value for name, value in image.items() if not name.startswith(_CLUSTER) and name != "HOME"}
    return {**default, **own, **spec.env}


def _result(answer: Sequence[bytes]) -> ExecResult:
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
