"""What goes over the wire to an API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes_asyncio.client import Configuration

from deepswe.config import KubernetesConfig
from deepswe.sandbox.kubernetes.client import ApiError, Client


async def drain(client: Client) -> None:
    async for _ in client.lines("/watch", {}, 5.0):
        pass


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.request("GET", "/api"),
        lambda client: client.request("POST", "/api", body={}),
        drain,
        lambda client: client.enter("pod", "main", ["true"]),
    ],
)
def test_no_redirect_is_followed(ask: Callable[[Client], Awaitable[Any]]) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            found = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
            client = Client(KubernetesConfig(), found)
            try:
                with pytest.raises(ApiError, match="307 Redirect: it sends to '/elsewhere'") as caught:
                    await ask(client)
                assert not caught.value.passing
            finally:
                await client.close()
        finally:
            await runner.cleanup()

    asyncio.run(run())
    assert "/elsewhere" not in seen
    assert len(seen) == 1
