"""The vLLM policy against a stand-in: the contract, failures of servers, and where turns go."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.vllm_server.contract import CHECKS, NEVER, PROMPT, Subject, greedy
from tests.vllm_server.server import FakeVllm

from deepswe.config import VllmConfig
from deepswe.errors import ConfigError, PolicyError
from deepswe.policy import vllm as vllm_module
from deepswe.policy.base import Sampling
from deepswe.policy.vllm import VllmPolicy


@asynccontextmanager
async def serving(fake: FakeVllm, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(fake.app(), handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def weights(directory: Path) -> tuple[Path, Path]:
    made = []
    for name in ("first", "second"):
        folder = directory / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(name.encode())
        made.append(folder)
    return made[0], made[1]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_stand_in_keeps_the_contract(check: Callable[[Subject], Awaitable[None]], tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(FakeVllm(token_s=0.002)) as address:
            await check(Subject(address, weights(tmp_path), 0.003))

    asyncio.run(run())


async def many(stack: AsyncExitStack, fakes: list[FakeVllm], **options: Any) -> VllmPolicy:
    addresses = [await stack.enter_async_context(serving(fake)) for fake in fakes]
    return await stack.enter_async_context(VllmPolicy(VllmConfig(servers=tuple(addresses), **options)))


def test_turns_go_to_the_server_with_least_to_do_and_a_trajectory_stays() -> None:
    async def run() -> None:
        fakes = [FakeVllm(token_s=0.001) for _ in range(3)]
        async with AsyncExitStack() as stack:
            engine = await many(stack, fakes)
            for _ in range(2):
                await asyncio.gather(*(engine.generate(f"t{n}", PROMPT, greedy(10), timeout_s=20) for n in range(9)))
        assert [fake.served for fake in fakes] == [6, 6, 6]

    asyncio.run(run())


def test_a_server_killed_in_mid_turn_costs_no_token_and_another_goes_on() -> None:
    async def run() -> None:
        fakes = [FakeVllm(token_s=0.003), FakeVllm(token_s=0.003)]
        async with AsyncExitStack() as stack:
            doomed = await stack.enter_async_context(AsyncExitStack())
            addresses = [
                await doomed.enter_async_context(serving(fakes[0])),
                await stack.enter_async_context(serving(fakes[1])),
            ]
            engine = await stack.enter_async_context(VllmPolicy(VllmConfig(servers=tuple(addresses))))
            turn = asyncio.create_task(engine.generate("a", PROMPT, greedy(60), timeout_s=20))
            await asyncio.sleep(0.06)
            begun = len(next(iter(engine._flying)).tokens)
            fakes[0].kill()
            await doomed.aclose()
            done = await turn
            whole = await engine.generate("b", PROMPT, greedy(60), timeout_s=20)
        assert begun > 0
        assert done.tokens == whole.tokens
        assert fakes[1].served == 2

    asyncio.run(run())


def test_a_server_that_comes_back_is_used_only_with_the_present_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_module, "RECOVER_S", 0.02)

    async def run() -> None:
        async with serving(FakeVllm()) as address, VllmPolicy(VllmConfig(servers=(address,))) as engine:
            refreshed = []

            async def refresh(server: Any) -> None:
                refreshed.append(server.address)

            engine.refresh = refresh
            engine._failed(engine.servers[0], PolicyError("down"))
            done = await engine.generate("a", PROMPT, greedy(3), timeout_s=20)
            assert (done.finish, refreshed) == ("length", [address])

    asyncio.run(run())


def test_no_server_at_all_is_an_error_that_quotes_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_module, "PATIENCE_S", 0.2)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            inner = await stack.enter_async_context(AsyncExitStack())
            address = await inner.enter_async_context(serving(FakeVllm()))
            engine = await stack.enter_async_context(VllmPolicy(VllmConfig(servers=(address,))))
            await inner.aclose()
            with pytest.raises(PolicyError, match="none of 1 vLLM servers"):
                await engine.generate("a", PROMPT, greedy(3), timeout_s=20)

    asyncio.run(run())


def test_a_silent_server_counts_as_dead() -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            fakes = [FakeVllm(token_s=100.0), FakeVllm()]
            engine = await many(stack, fakes, silence_s=0.2)
            begun = time.monotonic()
            done = await engine.generate("a", PROMPT, greedy(3), timeout_s=20)
        assert done.finish == "length"
        assert time.monotonic() - begun < 5

    asyncio.run(run())


def test_without_servers_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="deepswe serve"):
        VllmPolicy(VllmConfig())


def test_log_probs_at_another_temperature_than_the_sampling_are_refused() -> None:
    async def run() -> None:
        async with serving(FakeVllm()) as address, VllmPolicy(VllmConfig(servers=(address,))) as engine:
            await engine.check_temperature(0.5)
        raw = FakeVllm(processed=False)
        async with serving(raw) as address, VllmPolicy(VllmConfig(servers=(address,))) as engine:
            await engine.check_temperature(1.0)
            with pytest.raises(PolicyError, match="processed_logprobs"):
                await engine.check_temperature(0.5)

    asyncio.run(run())


def test_a_cancelled_turn_is_ended_on_the_server() -> None:
    async def run() -> None:
        fake = FakeVllm(token_s=0.01)
        async with serving(fake) as address, VllmPolicy(VllmConfig(servers=(address,))) as engine:
            turn = asyncio.create_task(engine.generate("a", PROMPT, Sampling(500, 1.0, NEVER, 0), timeout_s=20))
            await asyncio.sleep(0.1)
            assert fake.running == 1
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            async with asyncio.timeout(5):
                while fake.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/v1/models", web.Response(status=307, headers={"Location": "http://127.0.0.1:9"}), "redirect to 'http://127"),
        ("/v1/models", web.json_response(["toy"]), "something else than was asked for"),
        ("/v1/models", web.json_response({"data": [{"id": "toy", "max_model_len": "long"}]}), "something else than"),
    ],
)
def test_a_server_that_answers_otherwise_is_one_error(path: str, answer: web.Response, words: str) -> None:
    async def run() -> None:
        async def answering(request: web.Request) -> web.Response:
            return answer

        app = web.Application()
        app.router.add_get(path, answering)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            with pytest.raises(PolicyError, match=words):
                async with VllmPolicy(VllmConfig(servers=(address,))):
                    pass
        finally:
            await runner.cleanup()

    asyncio.run(run())


@pytest.mark.parametrize(
    "line", [b"x" * 300_000, b'{"choices": [5]}', b'{"choices": [{"logprobs": {"tokens": ["x"]}}]}']
)
def test_a_stream_that_cannot_be_read_is_the_servers_failure(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_module, "READ_BYTES", 1 << 12)

    class Garbling(FakeVllm):
        async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: " + line + b"\n\n")
            return response

    async def run() -> None:
        async with serving(Garbling()) as address, VllmPolicy(VllmConfig(servers=(address,), retries=0)) as engine:
            with pytest.raises(PolicyError, match=r"broke off|something else than was asked for"):
                await engine.generate("a", PROMPT, greedy(3), timeout_s=20)

    asyncio.run(run())
