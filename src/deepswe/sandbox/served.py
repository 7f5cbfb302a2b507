"""The supervisor's side of a resident server, over any stream of bytes: requests, answers, and what they mean."""

from __future__ import annotations

import asyncio
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from deepswe.deadlines import call_off, running_deadlines
from deepswe.errors import SandboxDied, SandboxError
from deepswe.sandbox import server
from deepswe.sandbox.base import ExecResult, SandboxSpec
from deepswe.sandbox.files import CommandFiles

GRACE_S = 20.0
"""How long, beyond a command's own limit, the server may take to answer before the sandbox counts as dead."""
FILE_TIMEOUT_S = 120.0
SECOND_LOOK_S = 2.0
"""An answer may have arrived while the supervisor's own loop stood still: after a deadline look once more."""
BATCH_BYTES = 4 << 20
VARIABLES = 256
"""Names and values, of those used last, whose bytes are kept."""
FRAME_BYTES = 1 << 30

Answer = tuple[int, list[bytes]]
Result = TypeVar("Result")


class Wire:
    """Frames to and from one server; each answer goes to whoever waits for it. On one event loop.

    A frame that is cut, altered or too long ends the wire: what follows cannot be trusted.
    """

    def __init__(self, send: Callable[[bytes], None], seal: Callable[[bytes], bytes] = lambda frame: b"") -> None:
        """Begin.

        Args:
            send: takes bytes to the server; called with whole frames, must not block.
            seal: what stands behind each frame, as `server.Server.seal` has it.
        """
        self._send = send
        self._seal = seal
        self._seal_bytes = len(seal(b""))
        self._inbox = bytearray()
        self._waiting: dict[int, asyncio.Future[Answer | None]] = {}
        self._calls = 0
        self._deadlines = running_deadlines()
        self.lost = ""
        """Why the wire ended; empty while it lives."""
        self.hello: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True once the server greets; False if it never will."""

    def feed(self, data: bytes | memoryview) -> None:
        """Take what arrived."""
        if self.lost:
            return
        self._inbox += data
        while len(self._inbox) >= 4:
            size = 4 + int.from_bytes(self._inbox[:4], "big")
            if size > FRAME_BYTES:
                self.lose(f"a frame of {size} bytes")
                return
            if len(self._inbox) < size + self._seal_bytes:
                return
            frame = bytes(memoryview(self._inbox)[:size])
            seal = bytes(memoryview(self._inbox)[size : size + self._seal_bytes])
            del self._inbox[: size + self._seal_bytes]
            try:
                if seal != self._seal(frame):
                    raise ValueError("a frame was cut or altered on its way")
                self._dispatch(*server.unpack(frame[4:]))
            except ValueError as error:
                self.lose(str(error))
                return

    def _dispatch(self, call: int, kind: int, fields: list[bytes]) -> None:
        if kind == server.HELLO:
            if not self.hello.done():
                self.hello.set_result(True)
            return
        waiting = self._waiting.pop(call, None)
        if waiting is not None and not waiting.done():
            waiting.set_result((kind, fields))

    def lose(self, reason: str) -> None:
        """The stream has ended: nobody waits any longer. Later calls do nothing."""
        if self.lost:
            return
        self.lost = reason or "it ended"
        _settle(self.hello, False)
        for waiting in self._waiting.values():
            _settle(waiting, None)
        self._waiting.clear()

    async def greeted(self, timeout_s: float) -> bool:
        """Wait for the server's greeting; False if it does not come in time, or never will."""
        deadlines = self._deadlines
        ticket = deadlines.set(timeout_s, deadlines.loop.call_later, SECOND_LOOK_S, _settle, self.hello, False)
        try:
            return await self.hello
        finally:
            call_off(ticket)

    async def ask(self, kind: int, fields: Sequence[bytes], timeout_s: float) -> Answer | None:
        """One request and its answer; None if the wire was or is lost meanwhile.

        Raises:
            TimeoutError: no answer came; the server was told to forget the call.
        """
        if self.lost:
            return None
        self._calls += 1
        call = self._calls
        deadlines = self._deadlines
        answer: asyncio.Future[Answer | None] = deadlines.loop.create_future()
        self._waiting[call] = answer
        self._put(server.pack(call, kind, *fields))
        # First to look again a little later, then to give up.
        ticket = deadlines.set(timeout_s, deadlines.loop.call_later, SECOND_LOOK_S, _give_up, answer)
        try:
            return await answer
        finally:
            call_off(ticket)
            if self._waiting.pop(call, None) is not None:
                self._put(server.pack(call, server.CANCEL))

    def _put(self, frame: bytes) -> None:
        self._send(frame + self._seal(frame))


def _settle(future: asyncio.Future[Result], result: Result) -> None:
    """Unless it is settled already."""
    if not future.done():
        future.set_result(result)


def _give_up(answer: asyncio.Future[Answer | None]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


class ServedSandbox(CommandFiles, ABC):
    """A sandbox whose commands a resident server runs; a backend gives it the way to ask that server."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, environment: Mapping[str, str]) -> None:
        """Describe it.

        Args:
            sandbox_id: its name.
            spec: what it was started from.
            environment: variables of every command.
        """
        self.id = sandbox_id
        self.spec = spec
        self._environment = environment

    @abstractmethod
    async def _call(self, kind: int, fields: Sequence[bytes], timeout_s: float) -> Answer:
        """One request and its answer.

        Raises:
            SandboxDied: the sandbox has ended or does not answer.
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
        """Run one command; see the protocol. A timeout ends background processes of earlier commands too, unless
        another command runs at that moment."""
        variables = {**self._environment, **(env or {})}
        if not argv or "\0" in " ".join((*argv, *variables, *variables.values(), cwd or "")):
            raise SandboxError(
                f"cannot run {list(argv)!r}: give a program, and no NUL byte in any argument or variable"
            )
        fields = [server.number(max(1, int(timeout_s * 1000))), server.number(self.spec.limits.output_bytes)]
        fields += [b"1" if channel else b"0", encode(cwd or self.spec.workdir), stdin, server.number(len(argv))]
        fields += [encode(part) for part in argv]
        for name, value in variables.items():
            fields += [_encode_variable(name), _encode_variable(value)]
        if files and sum(map(len, files.values())) >= BATCH_BYTES:
            await self.write_files(files)
            files = None
        if files:
            first = [
                server.number(len(files)),
                *(part for path, data in files.items() for part in (absolute(path), data)),
            ]
            kind, answer = await self._call(server.WRITE_EXEC, [*first, *fields], timeout_s + FILE_TIMEOUT_S)
        else:
            kind, answer = await self._call(server.EXEC, fields, timeout_s + GRACE_S)
        if kind == server.FAILED and len(answer) == 3 and answer[1]:
            raise file_error(self.id, answer)
        if kind != server.DONE or len(answer) != 8:
            words = " ".join(part.decode("utf-8", "replace") for part in answer)
            raise SandboxError(f"sandbox {self.id} could not run {argv[0]!r}: {words}")
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
        kind, answer = await self._call(server.READ, [absolute(path), server.number(max_bytes)], FILE_TIMEOUT_S)
        if kind == server.DATA and len(answer) == 1:
            return answer[0]
        raise file_error(self.id, answer)

    async def write_files(self, files: Mapping[str, bytes], *, executable: bool = False) -> None:
        """Write whole files; see the protocol."""
        flag = b"1" if executable else b"0"
        batch: list[bytes] = [flag]
        size = 0
        for path, data in files.items():
            batch += [absolute(path), data]
            size += len(data)
            if size >= BATCH_BYTES:
                await self._write(batch)
                batch, size = [flag], 0
        if len(batch) > 1:
            await self._write(batch)

    async def _write(self, batch: list[bytes]) -> None:
        kind, answer = await self._call(server.WRITE, batch, FILE_TIMEOUT_S)
        if kind != server.WRITTEN:
            raise file_error(self.id, answer)

    def death(self, why: str) -> SandboxDied:
        """The error of every call after the end."""
        return SandboxDied(
            f"sandbox {self.id} has ended{': ' + why if why else ''}; "
            f"its processes and files may have passed limits.memory_mib={self.spec.limits.memory_mib}"
        )


def absolute(path: str) -> bytes:
    """A path as bytes.

    Raises:
        ValueError: it is not absolute.
    """
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"path {path!r} is not absolute")
    return encode(path)


def encode(text: str) -> bytes:
    """UTF-8, with undecodable bytes of file names as Python's `os.fsdecode` gave them; any text has a form."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


_encode_variable = functools.lru_cache(maxsize=VARIABLES)(encode)
"""Every command of a run has much the same environment."""


def file_error(sandbox: str, answer: Sequence[bytes]) -> Exception:
    """What the answer FAILED of a server means."""
    if len(answer) != 3:
        return SandboxError(f"sandbox {sandbox} gave an answer of {len(answer)} parts")
    code, path, text = int(answer[0]), os.fsdecode(answer[1]), answer[2].decode("utf-8", "replace")
    return OSError(code, text, path) if code else ValueError(f"{path} {text}")
