from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from aiohttp import web
from tests.endpoint_server.faults import FAULTS, Faults
from tests.endpoint_server.server import KEY, Endpoint, serve
from tests.endpoint_server.solver import Solver

from deepswe.config import AgentConfig, EndpointConfig, MicroTasks
from deepswe.envs.prompts import opening_messages
from deepswe.errors import (
    EndpointBusy,
    EndpointCut,
    EndpointFailed,
    EndpointGarbled,
    EndpointMiscount,
    EndpointRefused,
    EndpointTimeout,
    PolicyError,
)
from deepswe.policy import chat_http
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.chat import ChatPolicy, Request
from deepswe.policy.chat_answer import Answer, Call, turn_text
from deepswe.policy.chat_anthropic import AnthropicStyle
from deepswe.policy.chat_http import open_transport, retry_after
from deepswe.policy.chat_openai import OpenAIStyle
from deepswe.policy.scripted import ByteRenderer
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tools.calls import parse_call
from deepswe.tools.catalog import TOOLS
from deepswe.types import Message

MICRO = MicroTasks(train=1, heldout=2, unseen=0)
SCHEMAS = [tool.schema() for tool in TOOLS]
STYLES = {"openai": OpenAIStyle, "anthropic": AnthropicStyle}
SAMPLING = Sampling(max_tokens=1000, temperature=1.0, stop_tokens=frozenset(), seed=7)
BYTES = ByteRenderer()


@pytest.fixture(scope="module")
def solver() -> Solver:
    return Solver(MICRO, mistakes=0.0)


def opening(format_: str = "native") -> tuple[int, ...]:
    task = micro_task_set(MICRO).split("heldout")[0]
    agent = AgentConfig(format=format_)  # type: ignore[arg-type]
    return BYTES.opening(opening_messages(task.problem_statement, agent, TOOLS, "/testbed"))


def converse(
    endpoint: Endpoint,
    observations: Sequence[str],
    *,
    tools: bool = True,
    key: str = KEY,
    max_tokens: int = 1 << 20,
    timeout_s: float = 20.0,
    record: list[Request] | None = None,
    **settings: Any,
) -> list[Completion]:
    """One turn, and one more after each observation."""

    async def talk() -> list[Completion]:
        config = EndpointConfig(model="m", backoff_s=0.01, **settings)
        style = STYLES[config.style]()
        turns = []
        async with serve(endpoint) as url, open_transport(url + style.path, style.headers(key)) as transport:
            policy = ChatPolicy(
                config, style, transport, tools=SCHEMAS if tools else (), max_tokens=max_tokens,
                record=(record if record is not None else []).append,
            )  # fmt: skip
            stream = list(opening("native" if tools else "xml"))
            for observation in (None, *observations):
                if observation is not None:
                    stream += BYTES.observation(observation, truncated=turns[-1].finish == "length")
                turns.append(await policy.generate("t", stream, SAMPLING, timeout_s=timeout_s))
                stream += turns[-1].tokens
        return turns

    return asyncio.run(talk())


def test_a_stream_of_bytes_is_read_back_as_its_conversation() -> None:
    said = [Message("system", "s"), Message("user", "u \udc80")]
    stream = [*BYTES.opening(said), *BYTES.completion("turn"), *BYTES.observation("seen", role="tool")]
    assert BYTES.conversation(stream) == (*said, Message("assistant", "turn"), Message("tool", "seen"))
    cut = [*BYTES.opening(said), *BYTES.completion("turn")[:-1], *BYTES.observation("seen", truncated=True)]
    assert BYTES.conversation(cut)[2:] == (Message("assistant", "turn"), Message("user", "seen"))
    with pytest.raises(PolicyError, match="has no end"):
        BYTES.conversation([257, 65, 66])


@pytest.mark.parametrize("style", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [True, False])
def test_native_calls_become_our_calls_and_observations_answer_them_by_id(
    solver: Solver, style: str, stream: bool
) -> None:
    endpoint = Endpoint(solver, Faults())
    first, second = converse(endpoint, ["what was found"], style=style, stream=stream)
    text = BYTES.decode(first.tokens)
    parsed = parse_call(text, "native")
    assert parsed.call is not None
    assert parsed.call.name in ("search", "file_editor")
    assert parsed.extra is False
    assert first.finish == second.finish == "stop"
    assert text.startswith("<think>\nHm.\n</think>") == (style == "anthropic")
    sent = endpoint.bodies[1]["messages"]
    if style == "openai":
        call = sent[-2]["tool_calls"][0]
        assert sent[-1] == {"role": "tool", "tool_call_id": call["id"], "content": "what was found"}
        assert json.loads(call["function"]["arguments"]) == dict(parsed.call.arguments)
        assert endpoint.bodies[0]["parallel_tool_calls"] is False
    else:
        assert [block["type"] for block in sent[-2]["content"]] == ["thinking", "text", "tool_use"]
        assert sent[-2]["content"][0]["signature"] == "signed"
        answer = sent[-1]["content"][0]
        assert (answer["type"], answer["content"]) == ("tool_result", "what was found")
        assert answer["tool_use_id"] == sent[-2]["content"][-1]["id"]
        assert endpoint.bodies[0]["system"].startswith("You are a software engineer")


@pytest.mark.parametrize("style", ["openai", "anthropic"])
def test_calls_in_the_text_need_no_tools_and_are_answered_by_the_user(solver: Solver, style: str) -> None:
    endpoint = Endpoint(solver, Faults())
    first, _ = converse(endpoint, ["seen"], tools=False, style=style)
    assert parse_call(BYTES.decode(first.tokens), "xml").call is not None
    assert "tools" not in endpoint.bodies[0]
    assert endpoint.bodies[1]["messages"][-1] == {"role": "user", "content": "seen"}


def test_usage_is_the_endpoints_own_and_priced(solver: Solver) -> None:
    endpoint = Endpoint(solver, Faults())
    (turn,) = converse(endpoint, [], dollars_in=3.0, dollars_out=15.0)
    assert turn.usage is not None
    ((prompt, completion),) = endpoint.true.values()
    assert (turn.usage.prompt, turn.usage.completion, turn.usage.estimated) == (prompt, completion, False)
    assert turn.usage.dollars == pytest.approx((3 * prompt + 15 * completion) / 1e6)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_met_by_another_try(solver: Solver, fault: str) -> None:
    record: list[Request] = []
    endpoint = Endpoint(solver, Faults(1.0, only=fault), slow_s=2.0)
    (turn,) = converse(endpoint, [], record=record, timeout_s=30.0,
                       idle_s=1.0 if fault == "slow" else 30.0)  # fmt: skip
    assert turn.finish == "stop"
    assert [request.outcome for request in record[-1:]] == ["answered"]
    named = {"busy": "EndpointBusy", "failed": "EndpointFailed", "slow": "EndpointTimeout", "reset": "EndpointCut",
             "malformed": "EndpointGarbled", "cut": "EndpointCut", "event": "EndpointGarbled"}  # fmt: skip
    assert record[0].outcome == named[fault]
    assert len(record) == 2


@pytest.mark.parametrize(
    ("fault", "error"),
    [("busy", EndpointBusy), ("failed", EndpointFailed), ("slow", EndpointTimeout), ("reset", EndpointCut),
     ("malformed", EndpointGarbled), ("cut", EndpointCut), ("event", EndpointGarbled)],
)  # fmt: skip
def test_without_tries_left_the_failure_has_its_own_type(solver: Solver, fault: str, error: type[PolicyError]) -> None:
    with pytest.raises(error):
        converse(
            Endpoint(solver, Faults(1.0, only=fault), slow_s=2.0),
            [],
            retries=0,
            idle_s=1.0 if fault == "slow" else 30.0,
        )


def test_an_answer_that_is_still_coming_at_the_deadline_is_the_models_time_out(solver: Solver) -> None:
    (turn,) = converse(Endpoint(solver, Faults(1.0, only="slow"), slow_s=2.0), [], timeout_s=0.3)
    assert (turn.tokens, turn.finish) == ((), "timeout")


def test_a_wrong_key_is_refused_at_once_and_named(solver: Solver) -> None:
    endpoint = Endpoint(solver, Faults())
    with pytest.raises(EndpointRefused, match=r"401.*endpoint\.key_env"):
        converse(endpoint, [], key="wrong")
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize("style", ["openai", "anthropic"])
def test_impossible_counts_are_replaced_and_marked_or_refused(solver: Solver, style: str) -> None:
    (turn,) = converse(Endpoint(solver, Faults(lies=1.0)), [], style=style)
    assert turn.usage is not None
    assert turn.usage.estimated
    assert 0 < turn.usage.completion < 1000
    with pytest.raises(EndpointMiscount):
        converse(Endpoint(solver, Faults(lies=1.0)), [], style=style, usage="require", retries=1)


def test_a_full_conversation_ends_by_context_whether_we_count_it_or_the_endpoint_refuses_it(solver: Solver) -> None:
    first, second = converse(Endpoint(solver, Faults()), ["x" * 3000], max_tokens=1300)
    assert (first.finish, second.finish) == ("stop", "context")
    (refused,) = converse(Endpoint(solver, Faults(), context=10), [])
    assert (refused.finish, refused.tokens) == ("context", ())


def test_an_attempt_that_has_cost_enough_asks_no_more(solver: Solver) -> None:
    endpoint = Endpoint(solver, Faults())
    first, second = converse(endpoint, ["seen"], dollars_in=1000.0, max_dollars=0.01)
    assert (first.finish, second.finish, second.tokens) == ("stop", "cost", ())
    assert len(endpoint.bodies) == 1


def test_malformed_arguments_reach_the_parser_as_they_are_and_further_calls_are_answered() -> None:
    calls = (Call("a", "search", '{"search_term": '), Call("b", "finish", ""))
    text = turn_text(Answer("look: <tool_call>", "", calls, False, None, {}))
    parsed = parse_call(text, "native")
    assert parsed.mistake is not None
    assert parsed.mistake.error == "malformed_call"
    turn = OpenAIStyle().written("", calls)
    answers = OpenAIStyle().observation(turn, "bad JSON")
    assert [(row["tool_call_id"], row["content"][:8]) for row in answers] == [("a", "bad JSON"), ("b", "Not carr")]


def test_retry_after_is_read_as_seconds_or_as_a_date() -> None:
    assert retry_after("1.5", 0.0) == 1.5
    assert retry_after("Thu, 01 Jan 1970 00:01:00 GMT", 50.0) == 10.0
    assert retry_after("soon", 0.0) == retry_after("", 0.0) == retry_after("-3", 0.0) == 0.0


async def answered_with(raw: bytes) -> None:
    """One request to a server that sends `raw` again and again until it is left."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while not writer.is_closing():
            writer.write(raw)
            try:
                await writer.drain()
            except ConnectionError:
                return

    async with await asyncio.start_server(send, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with open_transport(f"http://127.0.0.1:{port}/", {}) as transport:
            await transport.ask({}, timeout_s=20.0, idle_s=20.0)


def test_an_answer_that_never_ends_is_left_at_its_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_http, "ANSWER_BYTES", 100_000)
    with pytest.raises(EndpointGarbled, match="more than 100000 bytes"):
        asyncio.run(answered_with(b"x" * 10_000))


def test_an_answer_that_is_nested_too_deeply_is_garbled() -> None:
    with pytest.raises(EndpointGarbled):
        chat_http._object(b"[" * 200_000)


async def asked(answer: Callable[[web.Request], Awaitable[web.StreamResponse]], headers: Mapping[str, str]) -> Any:
    """One request to a server that answers so."""
    app = web.Application()
    app.router.add_post("/v1/messages", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with open_transport(f"http://127.0.0.1:{runner.addresses[0][1]}/v1/messages", headers) as transport:
            return await transport.ask({"messages": ["secret"]}, timeout_s=20.0, idle_s=20.0)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_neither_key_nor_conversation_goes_elsewhere(status: int) -> None:
    seen: list[str] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await reader.read(1 << 16)).decode())
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as other:
            place = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}/v1/messages"

            async def send_away(request: web.Request) -> web.Response:
                return web.Response(status=status, headers={"Location": place})

            with pytest.raises(EndpointRefused, match=rf"{status}, a redirect to '{place}'.*set endpoint\.url"):
                await asked(send_away, AnthropicStyle().headers("secret"))

    asyncio.run(run())
    assert seen == []


def test_an_event_that_is_longer_than_the_buffer_is_garbled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_http, "LINE_BYTES", 1 << 12)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "' + b"x" * (1 << 17) + b'"}\n\n')
        return response

    with pytest.raises(EndpointGarbled, match="an event of the stream has more than 4096 bytes"):
        asyncio.run(asked(stream, {}))


def completion(name: Any, arguments: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"choices": [{"message": {"content": "", "tool_calls": [call]}, "finish_reason": "tool_calls"}]}


@pytest.mark.parametrize(("name", "arguments"), [("search", 5), ("search", ["a"]), ({"a": 1}, "{}"), (5, 5)])
def test_a_call_whose_name_or_arguments_are_no_text_is_garbled(name: Any, arguments: Any) -> None:
    with pytest.raises(EndpointGarbled, match="no text"):
        OpenAIStyle().read(completion(name, arguments))
    block = {"type": "tool_use", "id": "a", "name": name, "input": {}}
    if not isinstance(name, str):
        with pytest.raises(EndpointGarbled, match="no text"):
            AnthropicStyle().read({"content": [block], "stop_reason": "tool_use"})


def test_arguments_that_come_as_an_object_are_taken_as_their_text() -> None:
    (call,) = OpenAIStyle().read(completion("search", {"search_term": "x"})).calls
    assert call == Call("a", "search", '{"search_term": "x"}')
    delta = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "search", "arguments": {"search_term": "x"}}}]}
    whole = OpenAIStyle().whole([{"choices": [{"delta": delta, "finish_reason": "tool_calls"}]}])
    assert OpenAIStyle().read(whole).calls == (call,)


@pytest.mark.parametrize("index", [float("inf"), float("nan"), "first", None])
def test_an_index_that_is_no_number_is_garbled(index: Any) -> None:
    delta = {"tool_calls": [{"index": index, "function": {"name": "search"}}]}
    with pytest.raises(EndpointGarbled):
        OpenAIStyle().whole([{"choices": [{"delta": delta, "finish_reason": "stop"}]}])
    with pytest.raises(EndpointGarbled):
        AnthropicStyle().whole([{"type": "content_block_start", "index": index, "content_block": {"type": "text"}}])


def test_arguments_that_are_nested_too_deeply_are_malformed_and_no_failure() -> None:
    block = {"type": "tool_use", "id": "a", "name": "search", "partial_json": "[" * 200_000}
    answer = AnthropicStyle().read({"content": [block], "stop_reason": "tool_use"})
    assert list(answer.message["content"][0]["input"]) == ["malformed"]
