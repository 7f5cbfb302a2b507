"""What a chat endpoint says in one turn, in no vendor's format, and the text that the agent loop sees of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepswe.policy.base import Sampling
from deepswe.types import Message

Payload = dict[str, Any]
NOT_CARRIED_OUT = "Not carried out: only the first call of a turn counts."
"""What every further call of a turn is answered with."""


@dataclass(frozen=True, slots=True)
class Call:
    """A native tool call.

    Attributes:
        id: the endpoint's own.
        name: of the tool.
        arguments: the JSON text of an object, as the endpoint sent it; it may be malformed.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens that the endpoint says it read (those out of its cache included) and sampled."""

    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn.

    Attributes:
        text, thinking: what it wrote, and what it thought if it shows that.
        calls: native tool calls, in order.
        cut: it was ended by the limit on its tokens.
        counts: as the endpoint gave them, checked for their types only; None if they cannot be read.
        message: the turn as the endpoint wants to see it in the next request.
    """

    text: str
    thinking: str
    calls: tuple[Call, ...]
    cut: bool
    counts: Counts | None
    message: Payload


class Style(Protocol):
    """One vendor's format. Pure: no request is made here."""

    path: str

    def headers(self, key: str) -> dict[str, str]:
        """With the key; without one where it is empty."""
        ...

    def body(
        self, model: str, messages: Sequence[Payload], tools: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Payload:
        """A request for one turn, without `stream`. `tools` are `Tool.schema()`s; none for calls in the text."""
        ...

    def opening(self, messages: Sequence[Message]) -> list[Payload]:
        """The messages before the first turn."""
        ...

    def written(self, text: str, calls: Sequence[Call]) -> Payload:
        """A turn of which only the text is known, as a message."""
        ...

    def observation(self, turn: Payload, text: str) -> list[Payload]:
        """What the environment answered to a turn: each of its calls answered by its id, or a user's message."""
        ...

    def whole(self, events: Sequence[Payload]) -> Payload:
        """The events of a streamed answer, put together as the answer that is not streamed.

        Raises:
            EndpointCut: its end is missing.
            EndpointGarbled: they cannot be read.
        """
        ...

    def read(self, payload: Payload) -> Answer:
        """An answer that is not streamed.

        Raises:
            EndpointGarbled: it is none.
        """
        ...


def turn_text(answer: Answer) -> str:
    """The turn as a model with a template of its own would have written it: thinking, text, calls.

    A call is `<tool_call>JSON</tool_call>`, which `deepswe.tools.calls` reads; malformed arguments stay malformed, so
    that the model is told. What looks like a call in the text beside a native one is kept from being read as one.
    """
    thinking = answer.thinking.replace("</think>", "</ think>")
    parts = [f"<think>\n{thinking}\n</think>\n\n"] if thinking.strip() else []
    parts.append(answer.text.replace("<tool_call>", "<tool_call >") if answer.calls else answer.text)
    parts += [_call_text(call) for call in answer.calls]
    return "".join(parts)


def _call_text(call: Call) -> str:
    arguments = call.arguments if call.arguments.strip() else "{}"
    return f'\n<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'


def count(value: Any) -> int | None:
    """A number of tokens, or None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def with_options(body: Payload, options: Mapping[str, Any]) -> Payload:
    """The request with a recipe's own fields; the value "omit" takes a field away."""
    merged = {**body, **options}
    return {key: value for key, value in merged.items() if value != "omit"}
