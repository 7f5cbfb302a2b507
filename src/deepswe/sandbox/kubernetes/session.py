"""The session into one pod: calls and answers over a websocket that may break and is then opened anew.

The command that carries a session holds nothing (see `resident`), so a broken session costs time only: what was asked
and not answered is asked again, and what was received runs once. Bytes that the cluster lost on the way are noticed by
the codes of the frames, or by a deadline, and mended in the same way.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import aiohttp

from deepswe.sandbox import server
from deepswe.sandbox.kubernetes import program, resident
from deepswe.sandbox.kubernetes.client import ApiError, Client, pause_s
from deepswe.sandbox.kubernetes.failures import PodDied, Reason
from deepswe.sandbox.served import Answer

STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3
"""Channels of the protocol: the first byte of each message."""
CHUNK = 1 << 17
OPENING_S = 20.0
"""From the start of the command to its first answer."""
PROBE_S = 10.0
"""While an answer is awaited and nothing has come for so long, the server is asked to speak; any frame shows whether
one before it was lost. Silent for as long again, the session is opened anew."""
REPAIR_S = 60.0
"""How long a broken session is tried to be opened anew."""
PATIENCE_S = 10.0
"""So long before the end of a call's time, a session without an answer is opened anew: bytes may have been lost."""
TAIL = 2000
LEAVE_S = 1.0


class Broke(Exception):
    """The connection is of no more use; another may be."""


class _Connection:
    """One websocket, from the greeting to its end."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.words = ""
        self._early = bytearray()

    async def read(self) -> bytes:
        """The next bytes of the command's output.

        Raises:
            Broke: it ended; the text says why, as far as that was told.
        """
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            return early
        while True:
            message = await self.socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise Broke(self.words or f"the connection closed ({self.socket.close_code})")
            data: bytes = message.data
            if not data or len(data) == 1:
                continue
            if data[0] == STDOUT:
                return data[1:]
            if data[0] == STDERR:
                self.words = (self.words + data[1:].decode("utf-8", "replace"))[-TAIL:]
            elif data[0] == STATUS:
                self.words = f"{self.words.strip()} {_status(data[1:])}".strip()
                raise Broke(self.words)

    async def exactly(self, size: int) -> bytes:
        """So many bytes of the command's output."""
        data = bytearray()
        while len(data) < size:
            data += await self.read()
        self._early = data[size:]
        return bytes(data[:size])

    async def send(self, data: bytes) -> None:
        """Bytes for the command's input.

        Raises:
            Broke: the connection is gone.
        """
        try:
            for at in range(0, len(data), CHUNK):
                await self.socket.send_bytes(b"\0" + data[at : at + CHUNK])
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            raise Broke(str(error)) from error


def _status(data: bytes) -> str:
    """How the command ended, in words: the last message of a session."""
    try:
        told = json.loads(data)
    except ValueError:
        return repr(data[:200])
    return f"{told.get('reason', told.get('status', ''))}: {told.get('message', '')}".strip(": ")


class Session:
    """Calls to the resident server of one pod."""

    def __init__(
        self,
        client: Client,
        pod: str,
        container: str,
        python: str,
        pids: int,
        gate: asyncio.Semaphore,
        cause: Callable[[], Awaitable[PodDied | None]],
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            client: of the cluster.
            pod, container, python: where, and the interpreter there.
            pids: processes that the server there lets live.
            gate: admits so many sessions to be opened at once.
            cause: why the pod is gone, once it is known that it is.
        """
        self.opened = 0
        self.image_environment: dict[str, str] = {}
        self._client = client
        self._pod = pod
        self._container = container
        self._command = program.session_command(python)
        self._pids = pids
        self._gate = gate
        self._cause = cause
        self._key = secrets.token_bytes(program.KEY_BYTES)
        self._installed = False
        self._calls = 0
        self._asked: dict[int, tuple[bytes, asyncio.Future[Answer]]] = {}
        self._arrived: list[int] = []
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._death: PodDied | None = None
        self._heard = 0.0

    async def open(self) -> None:
        """Open it for the first time.

        Raises:
            PodDied: the pod is gone, or no session can be opened.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._task = asyncio.create_task(self._run(ready))
        await asyncio.shield(ready)

    async def call(self, kind: int, fields: Sequence[bytes], timeout_s: float) -> Answer:
        """One request and its answer.

        Args:
            kind: of the server's frames.
            fields: of the frame.
            timeout_s: until the sandbox counts as dead.

        Raises:
            PodDied: the pod is gone, or does not answer.
        """
        if self._death is not None:
            raise self._death
        self._calls += 1
        call = self._calls
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        body = server.pack(call, kind, *fields)[4:]
        self._asked[call] = (body, answer)
        self._outbox.put_nowait(body)
        try:
            await asyncio.wait((answer,), timeout=max(timeout_s - PATIENCE_S, timeout_s / 2))
            if not answer.done():
                await self._drop()
                await asyncio.wait((answer,), timeout=min(PATIENCE_S, timeout_s / 2))
            if not answer.done():
                words = f"pod {self._pod} has not answered for {timeout_s:.0f} s; it is ended"
                self.fail(PodDied(words, Reason.SESSION))
        finally:
            self._asked.pop(call, None)
            if not answer.done():
                self._outbox.put_nowait(server.pack(call, server.CANCEL)[4:])
        return answer.result()

    def fail(self, death: PodDied) -> None:
        """The sandbox is over: all calls, now and later, end with this error."""
        if self._death is None:
            self._death = death
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self._death)

    async def close(self) -> None:
        """Ask process 1 to end, and close the connection."""
        connection = self._connection
        if connection is not None and self._death is None:
            self._outbox.put_nowait(server.pack(0, resident.LEAVE)[4:])
            with suppress(TimeoutError):
                await asyncio.wait_for(self._outbox.join(), LEAVE_S)
        self.fail(PodDied(f"sandbox {self._pod} is closed", Reason.DELETED))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _drop(self) -> None:
        """Close the connection, so that another is opened."""
        if self._connection is not None:
            await self._connection.socket.close()

    # The connection, again and again.

    async def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            while True:
                connection = await self._connect()
                if not ready.done():
                    ready.set_result(None)
                await self._serve(connection)
        except PodDied as death:
            self.fail(death)
            if not ready.done():
                ready.set_exception(death)
        finally:
            if self._connection is not None:
                await self._connection.socket.close()
            ready.cancel()

    async def _connect(self) -> _Connection:
        """Open a connection, with new tries for `REPAIR_S`; the first for as long as `open` is waited for.

        Raises:
            PodDied: none can be had.
        """
        words = "no try was made"
        try:
            async with asyncio.timeout(REPAIR_S if self.opened else None):
                for attempt in range(1 << 20):
                    wait = 0.0
                    try:
                        async with self._gate:
                            return await self._try()
                    except Broke as error:
                        words = str(error)
                        if "executable file not found" in words or "no such file" in words:
                            raise PodDied(f"pod {self._pod} cannot run a session: {words}", Reason.CONFIG) from error
                    except ApiError as error:
                        words, wait = str(error), error.retry_after_s
                        if error.status in (401, 403):
                            raise PodDied(f"no session into pod {self._pod}: {words}", Reason.REFUSED) from error
                    death = await self._cause()
                    if death is not None:
                        raise death
                    await asyncio.sleep(pause_s(min(attempt, 4), wait) / 2)
        except TimeoutError:
            pass
        raise PodDied(f"no session into pod {self._pod} for {REPAIR_S:.0f} s: {words}", Reason.SESSION)

    async def _try(self) -> _Connection:
        """One connection, greeted and proved.

        Raises:
            Broke, ApiError: it could not be made.
            PodDied: the pod lost the sandbox.
        """
        try:
            async with asyncio.timeout(OPENING_S):
                socket = await self._client.enter(self._pod, self._container, self._command)
                connection = _Connection(socket)
                try:
                    await self._greet(connection)
                except BaseException:
                    await socket.close()
                    raise
        except TimeoutError as error:
            raise Broke(f"no answer within {OPENING_S:.0f} s") from error
        self._connection = connection
        self.opened += 1
        return connection

    async def _greet(self, connection: _Connection) -> None:
        magic = await connection.exactly(len(resident.MAGIC))
        if magic == program.WANTED:
            if self._installed:
                raise PodDied(f"pod {self._pod} was started anew, and what it held is lost", Reason.EXITED)
            await connection.send(program.parcel(self._key))
            magic = await connection.exactly(len(resident.MAGIC))
        if magic != resident.MAGIC:
            raise Broke(f"the pod greets with {magic!r}")
        nonce = await connection.exactly(resident.NONCE_BYTES)
        self._reader = resident.Codec(self._key, nonce, resident.DOWN)
        self._writer = resident.Codec(self._key, nonce, resident.UP)
        await connection.send(self._writer.encode(server.pack(0, server.HELLO, server.number(self._pids))[4:]))
        while True:
            for _, kind, fields in self._frames(await connection.read()):
                if kind == server.HELLO:
                    pairs = zip(fields[::2], fields[1::2], strict=True)
                    self.image_environment = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
                    self._installed = True
                    return

    def _frames(self, data: bytes) -> list[tuple[int, int, list[bytes]]]:
        try:
            return [server.unpack(body) for body in self._reader.decode(data)]
        except (resident.Broken, ValueError) as error:
            raise Broke(str(error)) from error

    async def _serve(self, connection: _Connection) -> None:
        """Ask what is not answered yet, then move frames both ways until the connection breaks."""
        self._outbox = asyncio.Queue()
        for call in sorted(self._asked):
            self._outbox.put_nowait(self._asked[call][0])
        self._heard = time.monotonic()
        helpers = [asyncio.create_task(self._write(connection)), asyncio.create_task(self._probe(connection))]
        try:
            while True:
                data = await connection.read()
                self._heard = time.monotonic()
                for call, kind, fields in self._frames(data):
                    self._take(call, kind, fields)
        except Broke:
            pass
        finally:
            self._connection = None
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
            await connection.socket.close()

    async def _probe(self, connection: _Connection) -> None:
        """Find out that bytes were lost, or that the other end is gone, before a call's own time is over."""
        asked = 0.0
        while True:
            await asyncio.sleep(PROBE_S)
            quiet = time.monotonic() - self._heard
            if not self._asked or quiet < PROBE_S:
                continue
            if asked > self._heard:
                await connection.socket.close()
                return
            asked = time.monotonic()
            self._outbox.put_nowait(server.pack(0, server.HELLO, server.number(self._pids))[4:])

    def _take(self, call: int, kind: int, fields: list[bytes]) -> None:
        if kind == server.HELLO:
            return
        self._arrived.append(call)
        _, answer = self._asked.get(call, (b"", None))
        if answer is not None and not answer.done():
            answer.set_result((kind, fields))

    async def _write(self, connection: _Connection) -> None:
        """Send requests, and with each what has been received since the last."""
        while True:
            body = await self._outbox.get()
            arrived, self._arrived = self._arrived, []
            frames = [self._writer.encode(server.pack(call, resident.ACKNOWLEDGE)[4:]) for call in arrived]
            try:
                await connection.send(b"".join(frames) + self._writer.encode(body))
            except Broke:
                await connection.socket.close()
                return
            self._outbox.task_done()
