"""A stand-in for a vLLM server: the endpoints that deepswe uses, over a toy language model.

The toy's next token depends on the last two and on the bytes of its weights file. What is tested against it is tested
against a real server by the same contract (`tests/vllm_server/contract.py`).

    python -m tests.vllm_server.server --port 8000 --token-s 0.01
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

VOCABULARY = 64
MODEL = "toy"


@dataclass
class Toy:
    """Log-probs of the next token, from a table that the weights seed."""

    weights: bytes = b"0"
    table: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def logprobs(self, context: list[int], temperature: float) -> list[float]:
        key = (context[-2] if len(context) > 1 else 0, context[-1])
        logits = self.table.get(key)
        if logits is None:
            seed = hashlib.blake2b(self.weights + repr(key).encode(), digest_size=8).digest()
            chance = random.Random(seed)
            logits = self.table[key] = [chance.gauss(0.0, 2.0) for _ in range(VOCABULARY)]
        logits = [value / (temperature or 1.0) for value in logits]
        top = max(logits)
        norm = top + math.log(sum(math.exp(value - top) for value in logits))
        return [value - norm for value in logits]

    def load(self, path: Path) -> None:
        self.weights = b"".join(file.read_bytes() for file in sorted(path.glob("*.safetensors")))
        self.table = {}


@dataclass
class FakeVllm:
    """One server's state.

    Attributes:
        token_s: seconds that one token takes.
        interval: tokens in one event of a stream.
        flat: answer each token without computing a distribution, for load tests.
        processed: log-probs are those at the temperature of the sampling, not at 1.
        native: whether it has the endpoints of the weight-transfer engines.
        calls: paths of control requests, in order.
    """

    token_s: float = 0.0
    interval: int = 1
    context: int = 4096
    flat: bool = False
    processed: bool = True
    native: bool = False
    toy: Toy = field(default_factory=Toy)
    running: int = 0
    aborted: int = 0
    served: int = 0
    paused: bool = False
    calls: list[str] = field(default_factory=list)
    open: set[Any] = field(default_factory=set)

    def kill(self) -> None:
        """Break every stream off, as the death of the process does."""
        for transport in list(self.open):
            transport.abort()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
                web.post("/v1/completions", self.completions),
                web.post("/collective_rpc", self.collective_rpc),
                web.post("/reset_prefix_cache", self.control),
                web.post("/pause", self.control),
                web.post("/resume", self.control),
                web.get("/is_paused", self.is_paused),
            ]
        )
        if self.native:
            names = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
            app.add_routes([web.post(f"/{name}", self.control) for name in names])
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def models(self, request: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [entry]})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} {float(self.running)}\n'
        )

    async def control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        self.paused = request.path == "/pause" or (self.paused and request.path != "/resume")
        return web.json_response({})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(body["method"])
        if body["method"] != "reload_weights":
            return refusal(500, f"no method {body['method']}")
        self.toy.load(Path(body["kwargs"]["weights_path"]))
        return web.json_response({"results": [None]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("model") != MODEL:
            return refusal(404, f"The model `{body.get('model')}` does not exist.")
        prompt = body["prompt"]
        if len(prompt) + body["max_tokens"] > self.context:
            return refusal(400, f"This model's maximum context length is {self.context} tokens.")
        if max(prompt) >= VOCABULARY and not self.flat:
            return refusal(400, f"Token id {max(prompt)} is out of vocabulary")
        self.running += 1
        self.open.add(request.transport)
        try:
            if body.get("stream"):
                return await self.stream(request, body)
            return web.json_response(self.whole(body))
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1
            self.open.discard(request.transport)
            self.served += 1

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, logprobs, finish = self.sample(body, list(body["prompt"]), body["max_tokens"], random.Random())
        choice = self.choice(body, tokens, logprobs, finish)
        choice["logprobs"]["top_logprobs"][0]["top"] = max(self.shown(body["prompt"], body))
        if "prompt_logprobs" in body:
            prompt = body["prompt"]
            entries: list[Any] = [None]
            for place in range(1, len(prompt)):
                value = self.toy.logprobs(prompt[:place], 1.0)[prompt[place]]
                entries.append({str(prompt[place]): {"logprob": value, "rank": 1, "decoded_token": "x"}})
            choice["prompt_logprobs"] = entries
        return {"id": "cmpl", "object": "text_completion", "model": MODEL, "choices": [choice]}

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        context, left = list(body["prompt"]), body["max_tokens"]
        chance = random.Random(body.get("seed"))
        finish, first = None, True
        while finish is None:
            count = min(self.interval, left)
            await asyncio.sleep(self.token_s * count)
            tokens, logprobs, finish = self.sample(body, context, count, chance)
            left -= len(tokens)
            finish = finish if finish == "stop" or left <= 0 else None
            choice = self.choice(body, tokens, logprobs, finish)
            if first and body.get("return_token_ids"):
                choice["prompt_token_ids"] = body["prompt"]
            first = False
            event = {"id": "cmpl", "object": "text_completion", "model": MODEL, "choices": [choice]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def sample(
        self, body: dict[str, Any], context: list[int], count: int, chance: random.Random
    ) -> tuple[list[int], list[float], str | None]:
        """Up to `count` tokens behind `context`, which grows; "stop", or "length" after all of them."""
        tokens: list[int] = []
        logprobs: list[float] = []
        if self.flat:
            context.extend([7] * count)
            return [7] * count, [-0.5] * count, "length"
        for _ in range(count):
            values = self.toy.logprobs(context, body["temperature"])
            if body["temperature"] == 0:
                token = values.index(max(values))
            else:
                token = chance.choices(range(VOCABULARY), [math.exp(value) for value in values])[0]
            tokens.append(token)
            logprobs.append(self.shown(context, body)[token])
            context.append(token)
            if token in body.get("stop_token_ids", ()):
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"

    def shown(self, context: list[int], body: dict[str, Any]) -> list[float]:
        return self.toy.logprobs(context, body["temperature"] if self.processed else 1.0)

    def choice(
        self, body: dict[str, Any], tokens: list[int], logprobs: list[float], finish: str | None
    ) -> dict[str, Any]:
        shown = [f"token_id:{token}" if body.get("return_tokens_as_token_ids") else f"<{token}>" for token in tokens]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "finish_reason": finish,
            "logprobs": {
                "tokens": shown,
                "token_logprobs": logprobs,
                "top_logprobs": [{text: value} for text, value in zip(shown, logprobs, strict=True)],
            },
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        return choice


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--flat", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # of requests that were broken off
    fake = FakeVllm(
        token_s=arguments.token_s, interval=arguments.interval, context=arguments.context, flat=arguments.flat
    )
    web.run_app(
        fake.app(), host="127.0.0.1", port=arguments.port, print=None, access_log=None, backlog=8192,
        handler_cancellation=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
