"""One vLLM server over HTTP: completions as a stream of token ids and log-probs, and what else it can be asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deepswe.errors import PolicyError
from deepswe.optional import optional_module

READ_BYTES = 1 << 22
"""Longest line of an answer: a prompt's ids come back in one, where they are asked for."""
CONTROL_S = 30.0
"""Requests that sample nothing, except those with a deadline of their own."""
_TOKEN = "token_id:"

OnTokens = Callable[[Sequence[int], Sequence[float]], None]


class ServerFailed(PolicyError):
    """A server did not answer, or broke off. Another one may do better."""


class VllmServer:
    """One server.

    Args:
        address: such as http://127.0.0.1:8000.
        session: the client session that all servers share.

    Attributes:
        load: requests in flight to it from here.
        version: of the weights that it is known to hold; None where it failed and may hold others.
        model: the name under which it serves, and context, the tokens of one request; known after `inspect`.
    """

    def __init__(self, address: str, session: Any) -> None:
        self.address, self._session = address.rstrip("/"), session
        self._aiohttp = optional_module("aiohttp", "vllm", "talk to vLLM servers")
        self.load = 0
        self.version: int | None = 0
        self.model, self.context = "", 0

    async def inspect(self, model: str) -> None:
        """Find out what it serves.

        Args:
            model: the name to use; empty takes the only one.

        Raises:
            ServerFailed: it does not answer.
            PolicyError: it serves no such model, or several and none is named.
        """
        answer = await self.get("/v1/models")
        with _understood(self.address):
            served = [(str(entry["id"]), int(entry.get("max_model_len") or 1 << 30)) for entry in answer["data"]]
        found = [entry for entry in served if model in ("", entry[0])]
        if len(found) != 1:
            names = ", ".join(name for name, _ in served) or "none"
            raise PolicyError(f"{self.address} serves {names}; name one of them by engine.vllm.model (it is {model!r})")
        self.model, self.context = found[0]

    async def complete(self, body: Mapping[str, Any], on_tokens: OnTokens, *, silence_s: float) -> str:
        """Stream one completion.

        Args:
            body: of POST /v1/completions, without what concerns the form of the answer.
            on_tokens: gets ids and log-probs as they come.
            silence_s: without a word for so long, the server has failed.

        Returns:
            the finish reason: "stop", "length" or "abort".

        Raises:
            ServerFailed: it did not answer, or broke off.
            PolicyError: it refused the request.
        """
        request = {**body, "model": self.model, "stream": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        finish = ""
        self.load += 1
        try:
            async with asyncio.timeout(silence_s) as quiet:
                url = f"{self.address}/v1/completions"
                async with self._session.post(url, json=request, allow_redirects=False) as response:
                    await self._check(response, "/v1/completions")
                    async for line in response.content:
                        quiet.reschedule(asyncio.get_running_loop().time() + silence_s)
                        if not line.startswith(b"data:"):
                            continue
                        if line[5:].strip() == b"[DONE]":
                            break
                        with _understood(self.address):
                            finish = self._read_chunk(line[5:], on_tokens, request) or finish
        except TimeoutError as error:
            if not quiet.expired():
                raise ServerFailed(f"{self.address}: {error}") from error
            raise ServerFailed(f"{self.address} has said nothing for {silence_s:.0f} s") from error
        except (self._aiohttp.ClientError, self._aiohttp.http.HttpProcessingError, ConnectionError) as error:
            raise ServerFailed(f"{self.address} broke off: {type(error).__name__}: {error}") from error
        finally:
            self.load -= 1
        if not finish:
            raise ServerFailed(f"{self.address} ended its answer without a finish reason")
        return finish

    def _read_chunk(self, data: bytes, on_tokens: OnTokens, request: Mapping[str, Any]) -> str:
        chunk = _decoded(data, self.address)
        if "error" in chunk:
            raise ServerFailed(f"{self.address} broke off: {_message(chunk)}")
        if not chunk.get("choices"):
            return ""
        choice = chunk["choices"][0]
        if (read := choice.get("prompt_token_ids")) is not None and list(read) != list(request["prompt"]):
            raise PolicyError(
                f"{self.address} read other ids than were sent: {len(read)} instead of {len(request['prompt'])}, or "
                "others among them; its tokenizer must not touch them"
            )
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs") or ()
        tokens = choice.get("token_ids")
        if tokens is None:
            tokens = [int(text.removeprefix(_TOKEN)) for text in logprobs.get("tokens") or ()]
        if len(tokens) != len(values):
            raise PolicyError(f"{self.address} sent {len(tokens)} tokens with {len(values)} log-probs")
        if tokens:
            on_tokens(tokens, values)
        return str(choice.get("finish_reason") or "")

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Its log-probs of all tokens but the first, each after those before it.

        Raises:
            ServerFailed, PolicyError: as `complete`.
        """
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self.post("/v1/completions", body)
        with _understood(self.address):
            entries = answer["choices"][0].get("prompt_logprobs") or answer.get("prompt_logprobs")
            return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], tokens[1:], strict=True)]

    async def get(self, path: str) -> Any:
        """GET as JSON; nothing for an empty answer."""
        return await self._ask("GET", path, None, CONTROL_S)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = CONTROL_S) -> Any:
        """POST as JSON; nothing for an empty answer.

        Raises:
            ServerFailed: no answer, or 5xx.
            PolicyError: it refused; a path that it does not have says so.
        """
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                options = {} if body is None else {"json": dict(body)}
                url = f"{self.address}{path}"
                async with self._session.request(method, url, allow_redirects=False, **options) as response:
                    await self._check(response, path)
                    text = await response.text(errors="replace")
        except TimeoutError as error:
            raise ServerFailed(f"{self.address}{path} has not answered within {timeout_s:.0f} s") from error
        except (self._aiohttp.ClientError, ConnectionError) as error:
            raise ServerFailed(f"{self.address}{path}: {type(error).__name__}: {error}") from error
        return _decoded(text.encode(), self.address) if text.strip().startswith(("{", "[")) else {}

    async def _check(self, response: Any, path: str) -> None:
        """Turn a status into an error."""
        if response.status < 300:
            return
        if response.status < 400:
            place = response.headers.get("Location", "")[:300]
            raise PolicyError(
                f"{self.address}{path} answered {response.status}, a redirect to {place!r}, which is not followed; "
                "give that server's address in engine.vllm.servers"
            )
        text = (await response.text(errors="replace"))[:2000]
        said = _message(_decoded(text.encode(), self.address)) if text.startswith("{") else text[:300]
        if response.status >= 500 or response.status == 429:
            raise ServerFailed(f"{self.address}{path}: {response.status} {said}")
        if response.status == 404:
            raise PolicyError(
                f"{self.address} has no {path} ({said}); start it with `deepswe serve`, or in developer mode"
            )
        raise PolicyError(f"{self.address}{path}: {response.status} {said}")


@contextmanager
def _understood(address: str) -> Iterator[None]:
    """What a server answers is read inside; an answer of another shape is a failure of the server."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ServerFailed(f"{address} answered with something else than was asked for ({error!r})") from error


def _decoded(data: bytes, address: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ServerFailed(f"{address} answered no JSON: {data[:80]!r}") from error


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
