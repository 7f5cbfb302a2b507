"""The server: OpenAI's chat completions and Anthropic's messages, streamed or not, with a key, a context and faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from deepswe.tools.calls import render_call
from deepswe.tools.catalog import TOOLS
from deepswe.types import ToolCall
from tests.endpoint_server.faults import Faults, digest
from tests.endpoint_server.solver import Solver, flatten

KEY = "a-key"


class Endpoint:
    """Args: slow_s: how long a slow answer takes; context: tokens that fit (of 3 bytes)."""

    def __init__(self, solver: Solver, faults: Faults, *, slow_s: float = 30.0, context: int = 1 << 20) -> None:
        self.solver, self.faults, self.slow_s, self.context = solver, faults, slow_s, context
        self.bodies: list[dict[str, Any]] = []
        self.true: dict[str, tuple[int, int]] = {}
        self.lied: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._openai)
        app.router.add_post("/v1/messages", self._anthropic)
        app.router.add_get("/stats", self._stats)
        return app

    async def _stats(self, request: web.Request) -> web.Response:
        honest = [counts for key, counts in self.true.items() if key not in self.lied]
        return web.json_response(
            {
                "faults": self.faults.met,
                "requests": len(self.bodies),
                "prompt": sum(prompt for prompt, _ in honest),
                "completion": sum(completion for _, completion in honest),
                "honest": len(honest),
                "lied": len(self.lied),
            }
        )

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, request.headers.get("Authorization") == f"Bearer {KEY}", openai_events)

    async def _anthropic(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, request.headers.get("x-api-key") == KEY, anthropic_events)

    async def _serve(self, request: web.Request, known: bool, write: Any) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if not known:
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        if len(json.dumps(body["messages"])) // 3 > self.context:
            return web.json_response({"error": {"message": "maximum context length exceeded"}}, status=400)
        fault = self.faults.of(body)
        early = await self._fail_early(request, fault)
        if early is not None:
            return early
        text, call = self.solver.turn(flatten(body), int(body.get("seed", 0)))
        usage = self._usage(body, text, call)
        whole, events = write(body, text, call, usage)
        if not body.get("stream"):
            return web.json_response(whole)
        return await _stream(request, events, fault)

    async def _fail_early(self, request: web.Request, fault: str) -> web.StreamResponse | None:
        if fault == "busy":
            return web.json_response({"error": {"message": "later"}}, status=429, headers={"Retry-After": "0.05"})
        if fault == "failed":
            return web.Response(status=500, text="it broke")
        if fault == "malformed":
            return web.Response(text='{"choices": [{"mess', content_type="application/json")
        if fault == "slow":
            await asyncio.sleep(self.slow_s)
        if fault == "reset" and request.transport is not None:
            request.transport.abort()
        return None

    def _usage(self, body: dict[str, Any], text: str, call: ToolCall) -> dict[str, Any] | None:
        prompt = len(json.dumps([body["messages"], body.get("system", "")]).encode()) // 3 + 7
        completion = (len(text) + len(json.dumps(dict(call.arguments)))) // 3 + 5
        self.true[digest(body)] = (prompt, completion)
        lie = self.faults.lie(body)
        if lie:
            self.lied.add(digest(body))
        wrong = {"none": None, "zero": (0, 0), "huge": (10**9, 10**9), "text": ("many", "few")}
        counts = wrong.get(lie, (prompt, completion))
        return None if counts is None else {"prompt_tokens": counts[0], "completion_tokens": counts[1]}


def openai_events(body: Any, text: str, call: ToolCall, usage: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if "tools" in body:
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
        row = {"id": f"id-{len(body['messages'])}", "type": "function", "function": function}
        message["tool_calls"] = [row]
        half = len(function["arguments"]) // 2
        first = {**row, "index": 0, "function": {**function, "arguments": function["arguments"][:half]}}
        rest = {"index": 0, "function": {"arguments": function["arguments"][half:]}}
        deltas += [{"content": text}, {"tool_calls": [first]}, {"tool_calls": [rest]}]
    else:
        message["content"] = f"{text}\n{render_call(call, 'xml', TOOLS)}"
        deltas += [{"content": piece} for piece in message["content"].partition("\n")]
    finish = "tool_calls" if "tools" in body else "stop"
    whole = {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}
    events: list[dict[str, Any]] = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    events += [{"choices": [{"delta": {}, "finish_reason": finish}]}, {"choices": [], "usage": usage}]
    return whole, events


def anthropic_events(body: Any, text: str, call: ToolCall, usage: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    counts = {} if usage is None else usage
    read, wrote = {"input_tokens": counts.get("prompt_tokens")}, {"output_tokens": counts.get("completion_tokens")}
    blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": "Hm.", "signature": "signed"}]
    if "tools" in body:
        blocks.append({"type": "text", "text": text})
        blocks.append({"type": "tool_use", "id": f"id-{len(body['messages'])}", "name": call.name,
                       "input": dict(call.arguments)})  # fmt: skip
    else:
        blocks.append({"type": "text", "text": f"{text}\n{render_call(call, 'xml', TOOLS)}"})
    stop = "tool_use" if "tools" in body else "end_turn"
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"usage": read}}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        events += _block_events(index, block)
    events += [{"type": "message_delta", "delta": {"stop_reason": stop}, "usage": wrote}, {"type": "message_stop"}]
    return {"content": blocks, "stop_reason": stop, "usage": {**read, **wrote}}, events


def _block_events(index: int, block: dict[str, Any]) -> list[dict[str, Any]]:
    if block["type"] == "tool_use":
        empty = {**block, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    elif block["type"] == "thinking":
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]},
                  {"type": "signature_delta", "signature": block["signature"]}]  # fmt: skip
    else:
        empty, deltas = {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    start = {"type": "content_block_start", "index": index, "content_block": empty}
    grown = [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
    return [start, *grown, {"type": "content_block_stop", "index": index}]


async def _stream(request: web.Request, events: list[dict[str, Any]], fault: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    kept = events[: len(events) // 2] if fault in ("cut", "event") else events
    with contextlib.suppress(ConnectionResetError):
        await response.prepare(request)
        for event in kept:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if fault == "event":
            await response.write(b"data: {broken\n\n")
        elif fault != "cut":
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response


@asynccontextmanager
async def serve(endpoint: Endpoint, port: int = 0) -> AsyncIterator[str]:
    """The address of the endpoint, such as http://127.0.0.1:4711/v1, for the length of the block."""
    runner = web.AppRunner(endpoint.app(), access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[union-attr]
    finally:
        await runner.cleanup()
