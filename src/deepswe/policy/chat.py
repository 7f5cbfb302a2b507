"""A model that somebody serves, as a policy: the loop's stream of bytes becomes messages, its answer bytes again.

The loop speaks tokens (law 1), an endpoint speaks messages. Their common language here is the stream of
`ByteRenderer`: it holds the conversation exactly, and each turn's request is made from it. What an endpoint wants back
as it gave it (ids of calls, signatures of thoughts) is kept beside it, and used where the stream still holds that turn.
Its bytes are no tokens, so limits on tokens go by the endpoint's own counts, every turn carries its `Usage`, and a
trajectory with usage is never trained.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from deepswe.config import EndpointConfig
from deepswe.errors import EndpointBusy, EndpointError, EndpointMiscount, EndpointRefused
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.chat_answer import Answer, Call, Counts, Payload, Style, turn_text, with_options
from deepswe.policy.chat_http import ContextFull, Transport
from deepswe.policy.scripted import ByteRenderer
from deepswe.tools.calls import parse_call
from deepswe.types import Message, Usage

LONGEST_PAUSE_S = 60.0
BYTES_PER_TOKEN = 4
"""For counts of our own."""
TEMPLATE_TOKENS = 4096
"""What a server may add to a request: its template, its own words about tools."""


@dataclass(frozen=True, slots=True)
class Request:
    """One try of one request, for the record.

    Attributes:
        trajectory, turn: whose.
        outcome: "answered", or the class of the failure.
        wall_s: of the try.
        usage: what it cost; None where there was no answer.
    """

    trajectory: str
    turn: int
    outcome: str
    wall_s: float
    usage: Usage | None = None


@dataclass(slots=True)
class _Conversation:
    """What the endpoint gave, by number of turn, with the text that the stream holds of it; and what it has cost."""

    turns: dict[int, tuple[str, Payload]] = field(default_factory=dict)
    used: int = 0
    dollars: float = 0.0


class ChatPolicy:
    """See `deepswe.policy.base.Policy`. Many turns are asked for at once, on one event loop.

    Args:
        config: of the endpoint.
        style: its format.
        transport: connections to it.
        tools: declarations, for native calls; none where calls stand in the text.
        max_tokens: of one attempt, prompt included, by the endpoint's counts.
        record: is given every try.
    """

    version = 0

    def __init__(
        self,
        config: EndpointConfig,
        style: Style,
        transport: Transport,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int,
        record: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._config, self._style, self._transport = config, style, transport
        self._tools, self._max_tokens, self._record = tools, max_tokens, record
        self._renderer = ByteRenderer()
        self._conversations: dict[str, _Conversation] = {}
        self.refused: EndpointRefused | None = None
        """The refusal that every further request would get, too, such as of the key."""

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        """The endpoint's next turn.

        Its finish is "context" where its own counts, or its refusal, say that the conversation is full, "cost" where
        the attempt has cost `endpoint.max_dollars`, and "timeout" where it was still answering at the deadline.

        Raises:
            EndpointError: it failed, after all new tries that the recipe and the deadline allow.
        """
        held = self._conversations.setdefault(trajectory, _Conversation())
        if self._config.max_dollars and held.dollars >= self._config.max_dollars:
            return self._empty("cost")
        room = self._max_tokens - held.used
        if room <= 0:
            return self._empty("context")
        messages, turn = self._messages(held, self._renderer.conversation(stream))
        asked = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        body = (
            with_options(self._style.body(self._config.model, messages, self._tools, asked), self._config.options)
            | self._streaming()
        )
        try:
            answer, usage = await self._answer(trajectory, turn, body, asked.max_tokens, timeout_s)
        except ContextFull:
            return self._empty("context")
        if answer is None:
            return self._empty("timeout", usage)
        text = turn_text(answer)
        held.turns[turn] = (text, answer.message)
        held.used, held.dollars = usage.prompt + usage.completion, held.dollars + usage.dollars
        tokens = self._renderer.completion(text)
        if held.used > self._max_tokens or (answer.cut and asked.max_tokens < sampling.max_tokens):
            return Completion(tokens[:-1], (0.0,) * (len(tokens) - 1), "context", self.version, usage)
        kept = tokens[:-1] if answer.cut else tokens
        return Completion(kept, (0.0,) * len(kept), "length" if answer.cut else "stop", self.version, usage)

    async def release(self, trajectory: str) -> None:
        """Forget what the endpoint gave in it."""
        self._conversations.pop(trajectory, None)

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        """An endpoint needs no lock-step."""
        yield

    def _empty(self, finish: Any, usage: Usage | None = None) -> Completion:
        return Completion((), (), finish, self.version, usage or Usage(0, 0, 0))

    def _streaming(self) -> Payload:
        if not self._config.stream:
            return {"stream": False}
        return {"stream": True} | (
            {"stream_options": {"include_usage": True}} if self._config.style == "openai" else {}
        )

    def _messages(self, held: _Conversation, said: Sequence[Message]) -> tuple[list[Payload], int]:
        """The messages of a request, and the number of the turn that it asks for."""
        first = next((at for at, message in enumerate(said) if message.role == "assistant"), len(said))
        messages, turn = self._style.opening(said[:first]), 0
        before: Payload = {"content": []}
        for message in said[first:]:
            if message.role == "assistant":
                before = self._turn(held, turn, message.content)
                messages.append(before)
                turn += 1
            else:
                messages += self._style.observation(before, message.content)
        return messages, turn

    def _turn(self, held: _Conversation, turn: int, text: str) -> Payload:
        """A turn as the endpoint gave it, or made from its text where that was changed or is another process's."""
        known = held.turns.get(turn)
        if known is not None and known[0] == text:
            return known[1]
        parsed = parse_call(text, "native") if self._tools else None
        if parsed is None or parsed.call is None:
            return self._style.written(text, ())
        spoken = text.partition("<tool_call>")[0].strip()
        call = Call(f"call_{turn}", parsed.call.name, json.dumps(dict(parsed.call.arguments)))
        return self._style.written(spoken, (call,))

    async def _answer(
        self, trajectory: str, turn: int, body: Payload, most: int, timeout_s: float
    ) -> tuple[Answer | None, Usage]:
        """The answer, after as many tries as it takes; None where it was still coming at the deadline."""
        deadline, config = time.monotonic() + timeout_s, self._config
        pause = config.backoff_s
        for attempt in range(config.retries + 1):
            begun = time.monotonic()
            left = deadline - begun
            try:
                answer, usage = await self._try(body, most, min(config.timeout_s, max(left, 0.01)))
            except EndpointError as error:
                wall_s = time.monotonic() - begun
                late = left <= config.timeout_s and wall_s >= left
                usage = self._estimate(body, "") if late else Usage(0, 0, 0)
                self._record(Request(trajectory, turn, type(error).__name__, wall_s, usage if late else None))
                if late and attempt == 0:
                    return None, usage
                if isinstance(error, EndpointRefused):
                    self.refused = None if isinstance(error, ContextFull) else error
                    raise
                wait = error.retry_after_s or min(pause, LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
                if attempt == config.retries or time.monotonic() + wait >= deadline:
                    raise
                pause *= 2
                await asyncio.sleep(wait)
            else:
                self._record(Request(trajectory, turn, "answered", time.monotonic() - begun, usage))
                return answer, usage
        raise EndpointBusy(f"{config.url} was never asked")  # the last round of the loop returns or raises

    async def _try(self, body: Payload, most: int, timeout_s: float) -> tuple[Answer, Usage]:
        reply = await self._transport.ask(body, timeout_s=timeout_s, idle_s=self._config.idle_s)
        answer = self._style.read(self._style.whole(reply.events) if reply.streamed else reply.events[0])
        counts = answer.counts
        if counts is not None and plausible(counts, body, answer, most):
            return answer, self._priced(Usage(counts.prompt, counts.cached, counts.completion))
        if self._config.usage == "require":
            raise EndpointMiscount(f"{self._config.url} counts {counts} tokens, which cannot be for this answer")
        return answer, self._estimate(body, turn_text(answer))

    def _estimate(self, body: Payload, text: str) -> Usage:
        prompt = -(-request_bytes(body) // BYTES_PER_TOKEN)
        completion = -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
        return self._priced(Usage(prompt, 0, completion, estimated=True))

    def _priced(self, usage: Usage) -> Usage:
        config = self._config
        cached = config.dollars_in if config.dollars_cached is None else config.dollars_cached
        dollars = (usage.prompt - usage.cached) * config.dollars_in + usage.cached * cached
        return replace(usage, dollars=(dollars + usage.completion * config.dollars_out) / 1e6)


def request_bytes(body: Payload) -> int:
    """Bytes of what a model reads of a request: messages, system and tools."""
    read = {key: body[key] for key in ("messages", "system", "tools") if key in body}
    return len(json.dumps(read, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def plausible(counts: Counts, body: Payload, answer: Answer, most: int) -> bool:
    """Whether the counts can be those of this request and answer.

    No tokenizer makes more tokens than bytes, a server adds at most its template, nothing is sampled beyond the limit,
    and something was read; what was sampled is not empty where something was said.
    """
    said = bool(answer.text or answer.thinking or answer.calls)
    return (
        0 < counts.prompt <= request_bytes(body) + TEMPLATE_TOKENS
        and counts.cached <= counts.prompt
        and int(said) <= counts.completion <= most
    )
