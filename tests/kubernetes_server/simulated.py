"""Containers that are not there: they speak the resident server's protocol and do nothing, after a while."""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import suppress
from typing import Any

from deepswe.sandbox import server
from deepswe.sandbox.kubernetes import program, resident
from tests.kubernetes_server.channels import STDOUT, Channels, exited
from tests.kubernetes_server.faults import Faults

COMMAND_S = (0.005, 0.2)


class SimulatedContainer:
    def __init__(self, pod: dict[str, Any], faults: Faults) -> None:
        self.pod = pod
        self.faults = faults
        self.out_of_memory = False
        self.words = ""
        self.key: bytes | None = None
        self.answers: dict[int, bytes] = {}
        self.newest = 0
        self.running: set[asyncio.Task[None]] = set()
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.current: tuple[Channels, resident.Codec] | None = None
        self.lost = False

    async def start(self) -> None:
        pass

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    async def kill(self) -> None:
        self.end(137)

    async def terminate(self, grace_s: float) -> None:
        """Process 1 has no handler for SIGTERM."""
        if not self.code.done():
            await asyncio.wait((self.code,), timeout=grace_s)
        self.end(137)

    async def cut(self) -> None:
        self.lost = True

    def end(self, code: int) -> None:
        for task in self.running:
            task.cancel()
        if not self.code.done():
            self.code.set_result(code)

    async def exec(self, channels: Channels) -> None:
        """One session."""
        receiving = asyncio.create_task(channels.receive())
        serving = asyncio.create_task(self.serve(channels))
        try:
            await asyncio.wait((serving, self.code), return_when=asyncio.FIRST_COMPLETED)
            await channels.finish(exited(self.code.result() if self.code.done() else 0))
        finally:
            serving.cancel()
            receiving.cancel()
            await asyncio.gather(serving, receiving, return_exceptions=True)

    async def serve(self, channels: Channels) -> None:
        early = bytearray()

        async def exactly(size: int) -> bytes:
            while len(early) < size:
                data = await channels.stdin.get()
                if not data:
                    raise ConnectionError
                early.extend(data)
            taken = bytes(early[:size])
            del early[:size]
            return taken

        if self.key is None:
            await channels.send(STDOUT, program.WANTED)
            size = int.from_bytes(await exactly(4), "big")
            digest, content = await exactly(32), await exactly(size)
            assert hashlib.sha256(content).digest() == digest
            self.key = content[: program.KEY_BYTES]
        nonce = os.urandom(resident.NONCE_BYTES)
        await channels.send(STDOUT, resident.MAGIC + nonce)
        reader = resident.Codec(self.key, nonce, resident.UP)
        writer = resident.Codec(self.key, nonce, resident.DOWN)
        data = bytes(early)
        self.current = (channels, writer)
        while True:
            for body in reader.decode(data):
                await self.take(channels, writer, *server.unpack(body))
            data = await channels.stdin.get()
            if not data:
                return

    async def take(self, channels: Channels, writer: resident.Codec, call: int, kind: int, fields: list[bytes]) -> None:
        if self.lost:
            await asyncio.sleep(3600)
        if kind == resident.LEAVE:
            self.end(0)
        elif kind == server.HELLO:
            await channels.send(STDOUT, writer.encode(server.pack(0, server.HELLO)[4:]))
        elif kind == resident.ACKNOWLEDGE:
            self.answers.pop(call, None)
        elif call in self.answers:
            await channels.send(STDOUT, writer.encode(self.answers[call]))
        elif call > self.newest:
            self.newest = call
            task = asyncio.create_task(self.work(call, kind, fields))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def work(self, call: int, kind: int, fields: list[bytes]) -> None:
        if kind == server.EXEC:
            wait = self.faults.random.uniform(*COMMAND_S)
            await asyncio.sleep(wait)
            wall = server.number(int(wait * 1e6))
            body = server.pack(call, server.DONE, b"0", b"0", b"0", b"0", wall, b"simulated\n", b"", b"")
        elif kind == server.READ:
            body = server.pack(call, server.DATA, b"simulated")
        else:
            body = server.pack(call, server.WRITTEN)
        self.answers[call] = body[4:]
        if self.current is not None and not self.lost:
            channels, writer = self.current
            with suppress(ConnectionError):
                await channels.send(STDOUT, writer.encode(body[4:]))
