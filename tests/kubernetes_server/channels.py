"""The exec subresource: v4 and v5 of channel.k8s.io over a websocket. One byte of channel before each message.

As a real API server does it: a command that exists not is an upgraded connection without output, and the error is
on channel 3 alone; v5 adds channel 255, which closes a channel (standard input's end).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import WSMsgType, web

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
PIECE = 1 << 15
STALL_S = 1.0


def success() -> dict[str, Any]:
    return {"metadata": {}, "status": "Success"}


def exited(code: int) -> dict[str, Any]:
    if code == 0:
        return success()
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: command terminated with exit code {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def internal(message: str) -> dict[str, Any]:
    return {"metadata": {}, "status": "Failure", "message": message, "reason": "InternalError", "code": 500}


class Channels:
    """One session: bytes in by channel, bytes out by channel."""

    def __init__(self, request: web.Request, lose: Callable[[], bool]) -> None:
        self.socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=0, autoping=True)
        self.request = request
        self.lose = lose
        self.stdin: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.cut = False

    async def open(self) -> None:
        await self.socket.prepare(self.request)

    async def send(self, channel: int, data: bytes) -> None:
        """What cannot be sent in time, because the client does not read, is lost without a word."""
        if self.lose() and channel == STDOUT:
            data = data[: len(data) // 2]
        with suppress(ConnectionError, RuntimeError, TimeoutError):
            async with asyncio.timeout(STALL_S):
                await self.socket.send_bytes(bytes([channel]) + data)

    async def finish(self, status: dict[str, Any]) -> None:
        if not self.cut:
            await self.send(STATUS, json.dumps(status).encode())
        with suppress(ConnectionError, RuntimeError):
            await self.socket.close()

    async def receive(self) -> None:
        """Queue standard input until it ends."""
        try:
            async for message in self.socket:
                if message.type is not WSMsgType.BINARY or not message.data:
                    continue
                if message.data[0] == CLOSE and message.data[1:2] == b"\0":
                    break
                if message.data[0] == STDIN:
                    self.stdin.put_nowait(message.data[1:])
            else:
                self.closed.set()
        finally:
            self.stdin.put_nowait(b"")

    async def drop(self) -> None:
        """Cut the connection without a word."""
        self.cut = True
        transport = self.request.transport
        if transport is not None:
            transport.abort()


async def attach(channels: Channels, process: asyncio.subprocess.Process, wants_stdin: bool) -> None:
    """Move bytes between a session and a process, to the end of the process."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    receiving = asyncio.create_task(channels.receive())
    feeding = asyncio.create_task(feed(channels, process.stdin, wants_stdin))
    pumps = [
        asyncio.create_task(pump(process.stdout, lambda data: channels.send(STDOUT, data))),
        asyncio.create_task(pump(process.stderr, lambda data: channels.send(STDERR, data))),
    ]
    try:
        code = await process.wait()
        await asyncio.wait(pumps, timeout=2)
        await channels.finish(exited(code if code >= 0 else 128 - code))
    finally:
        for task in (receiving, feeding, *pumps):
            task.cancel()
        await asyncio.gather(receiving, feeding, *pumps, return_exceptions=True)


async def feed(channels: Channels, target: asyncio.StreamWriter, wants_stdin: bool) -> None:
    with suppress(ConnectionError):
        while wants_stdin and (data := await channels.stdin.get()):
            target.write(data)
            await target.drain()
        target.close()


async def pump(source: asyncio.StreamReader, send: Callable[[bytes], Awaitable[None]]) -> None:
    while data := await source.read(PIECE):
        await send(data)
