"""Chat completions in OpenAI's format, as vLLM, SGLang, llama.cpp and most hosted models speak it too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepswe.errors import EndpointCut, EndpointGarbled
from deepswe.policy.base import Sampling
from deepswe.policy.chat_answer import NOT_CARRIED_OUT, Answer, Call, Counts, Payload, count
from deepswe.types import Message

THINKING = ("reasoning_content", "reasoning")
"""Fields in which servers put what a model thought; it is not sent back to them."""


class OpenAIStyle:
    """See `deepswe.policy.chat_answer.Style`."""

    path = "/chat/completions"

    def headers(self, key: str) -> dict[str, str]:
        """A bearer token."""
        return {"Authorization": f"Bearer {key}"} if key else {}

    def body(
        self, model: str, messages: Sequence[Payload], tools: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Payload:
        """One call a turn is asked for; usage comes with the last event of a stream."""
        body: Payload = {
            "model": model,
            "messages": list(messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed % (1 << 31),
        }
        if tools:
            body |= {"tools": list(tools), "parallel_tool_calls": False}
        return body

    def opening(self, messages: Sequence[Message]) -> list[Payload]:
        """Role and content."""
        return [{"role": message.role, "content": message.content} for message in messages]

    def written(self, text: str, calls: Sequence[Call]) -> Payload:
        """An assistant's message."""
        message: Payload = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message

    def observation(self, turn: Payload, text: str) -> list[Payload]:
        """Messages of role "tool", or one of role "user"."""
        ids = [str(call["id"]) for call in turn.get("tool_calls", ())]
        if not ids:
            return [{"role": "user", "content": text}]
        said = [text, *[NOT_CARRIED_OUT] * (len(ids) - 1)]
        return [{"role": "tool", "tool_call_id": key, "content": words} for key, words in zip(ids, said, strict=True)]

    def whole(self, events: Sequence[Payload]) -> Payload:
        """Deltas of content, thinking and calls joined; the last usage wins."""
        message: Payload = {"role": "assistant", "content": ""}
        calls: dict[int, Payload] = {}
        finish, usage = None, None
        try:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    finish = choice.get("finish_reason") or finish
                    _join(message, calls, choice.get("delta") or {})
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise EndpointGarbled(f"an event of the stream is none of a chat completion ({error})") from error
        if finish is None:
            raise EndpointCut(f"the stream stopped after {len(events)} events without a finish_reason")
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}

    def read(self, payload: Payload) -> Answer:
        """The first choice."""
        try:
            choice = payload["choices"][0]
            said = choice["message"]
            text = said.get("content") or ""
            thinking = next((said[name] for name in THINKING if said.get(name)), "")
            calls = tuple(
                Call(
                    str(row.get("id") or f"call_{number}"),
                    row["function"]["name"],
                    _arguments(row["function"]),
                )
                for number, row in enumerate(said.get("tool_calls") or ())
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise EndpointGarbled(f"the answer is no chat completion ({error!r}): {str(payload)[:200]}") from error
        parts = (text, thinking, *(call.name for call in calls), *(call.arguments for call in calls))
        if not all(isinstance(part, str) for part in parts):
            raise EndpointGarbled(f"a text of the answer is no text: {str(payload)[:200]}")
        return Answer(
            text, thinking, calls, choice.get("finish_reason") == "length", _counts(payload), self.written(text, calls)
        )


def _join(message: Payload, calls: dict[int, Payload], delta: Payload) -> None:
    for name in ("content", *THINKING):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for row in delta.get("tool_calls") or ():
        call = calls.setdefault(int(row.get("index", 0)), {"id": "", "function": {"name": "", "arguments": ""}})
        call["id"] = row.get("id") or call["id"]
        function = row.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += _arguments(function)


def _arguments(function: Mapping[str, Any]) -> Any:
    """The arguments of a call as JSON text, also where a server sends the object itself."""
    given = function.get("arguments") or ""
    return json.dumps(given) if isinstance(given, dict) else given


def _counts(payload: Payload) -> Counts | None:
    usage = payload.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = count(usage.get("prompt_tokens")), count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    cached = count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return None if prompt is None or completion is None else Counts(prompt, cached or 0, completion)
