"""One request to a chat endpoint: its answer as plain values, or one typed failure. No new tries here."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError

from deepswe.errors import (
    EndpointBusy,
    EndpointCut,
    EndpointError,
    EndpointFailed,
    EndpointGarbled,
    EndpointRefused,
    EndpointTimeout,
)

LINE_BYTES = 1 << 22
"""Longest event of a stream."""
ANSWER_BYTES = 1 << 26
"""Longest answer."""
PASSING = (408, 409, 425)
"""Refusals that may pass, besides 429 and 5xx."""
_FULL = ("context_length_exceeded", "maximum context length", "prompt is too long", "exceeds the context", "too large")


class ContextFull(EndpointRefused):
    """The conversation does not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came: the events of a stream, or one object that is no stream."""

    streamed: bool
    events: tuple[dict[str, Any], ...]


class Transport:
    """Connections to one endpoint. Opened by `open_transport`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def ask(self, body: Mapping[str, Any], *, timeout_s: float, idle_s: float) -> Reply:
        """An answer, whole. A redirect is not followed: it would give the key and the conversation to another place.

        Args:
            body: sent as JSON; `stream` in it asks for a stream.
            timeout_s: for all of it.
            idle_s: longest silence.

        Raises:
            EndpointError: one of its kinds.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=min(30.0, timeout_s), sock_read=idle_s)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(self._url, json=body, timeout=limits, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise _refusal(self._url, response.status, await _body(response, 2000), response.headers)
                if response.content_type == "text/event-stream":
                    return Reply(True, await _events(response))
                return Reply(False, (_object(await _body(response, ANSWER_BYTES + 1)),))
        except TimeoutError as error:  # aiohttp's own time-outs are of this class, too
            raise EndpointTimeout(f"{self._url} gave no whole answer in {timeout_s:.0f} s") from error
        except aiohttp.InvalidURL as error:
            raise EndpointRefused(f"{self._url} is no address ({error}); check endpoint.url") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EndpointCut(f"{self._url}: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def open_transport(url: str, headers: Mapping[str, str]) -> AsyncIterator[Transport]:
    """Connections to `url`, made when needed and closed at the end of the block."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, read_bufsize=LINE_BYTES, trust_env=True
    ) as session:
        yield Transport(session, url)


async def _body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """At most the first `most` bytes of an answer, which may never end."""
    parts = bytearray()
    while len(parts) < most and (part := await response.content.read(min(1 << 16, most - len(parts)))):
        parts += part
    return bytes(parts)


async def _events(response: aiohttp.ClientResponse) -> tuple[dict[str, Any], ...]:
    events: list[dict[str, Any]] = []
    size = 0
    try:
        async for line in response.content:
            size += len(line)
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                break
            if data:
                events.append(_checked(_object(data)))
            if size > ANSWER_BYTES:
                raise EndpointGarbled(f"the answer has more than {ANSWER_BYTES} bytes")
    except (ValueError, HttpProcessingError) as error:  # a line that is longer than the buffer
        raise EndpointGarbled(f"an event of the stream has more than {LINE_BYTES} bytes") from error
    return tuple(events)


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) > ANSWER_BYTES:
        raise EndpointGarbled(f"the answer has more than {ANSWER_BYTES} bytes")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EndpointGarbled(f"the answer is not JSON ({error}): {raw[:200]!r}") from error
    if not isinstance(value, dict):
        raise EndpointGarbled(f"the answer is no object: {raw[:200]!r}")
    return _checked(value)


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    """An event, unless it tells of a failure in the middle of a stream or under status 200."""
    error = event.get("error")
    if not error:
        return event
    code = error.get("code") if isinstance(error, dict) else None
    kind = str(error.get("type", "")) if isinstance(error, dict) else ""
    words = str(error)[:500]
    if code == 429 or "rate_limit" in kind:
        raise EndpointBusy(f"it broke off: {words}")
    if any(mark in words.lower() for mark in _FULL):
        raise ContextFull(f"it broke off: {words}")
    raise EndpointFailed(f"it broke off: {words}")


def _refusal(url: str, status: int, body: bytes, headers: Mapping[str, str]) -> EndpointError:
    words = body.decode("utf-8", "replace")
    message = f"{url} answered {status}: {words[:500]}"
    error: EndpointError
    if status == 429:
        error = EndpointBusy(message)
    elif 300 <= status < 400:
        place = headers.get("Location", "")[:300]
        error = EndpointRefused(
            f"{url} answered {status}, a redirect to {place!r}, which is not followed; set endpoint.url to the address "
            "that answers itself"
        )
    elif status >= 500 or status in PASSING:
        error = EndpointFailed(message)
    elif status in (400, 413, 422) and any(mark in words.lower() for mark in _FULL):
        error = ContextFull(message)
    else:
        error = EndpointRefused(message + "; check endpoint.url, endpoint.model, endpoint.key_env and endpoint.options")
    error.retry_after_s = retry_after(headers.get("Retry-After", ""), time.time())
    return error


def retry_after(value: str, now: float) -> float:
    """Seconds that a Retry-After header asks for, given as seconds or as a date; 0 for none or nonsense."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return 0.0
