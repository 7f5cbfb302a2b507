"""Messages in Anthropic's format: content in blocks, tools by `tool_use` and `tool_result`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepswe.errors import EndpointCut, EndpointGarbled
from deepswe.policy.base import Sampling
from deepswe.policy.chat_answer import NOT_CARRIED_OUT, Answer, Call, Counts, Payload, count
from deepswe.types import Message

VERSION = "2023-06-01"
_GROWING = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""Type of a delta -> the field that carries it. A block collects it under the same name."""


class AnthropicStyle:
    """See `deepswe.policy.chat_answer.Style`. Thinking blocks go back with their signatures, as the format asks."""

    path = "/messages"

    def headers(self, key: str) -> dict[str, str]:
        """The key and the version of the format."""
        return {"anthropic-version": VERSION, **({"x-api-key": key} if key else {})}

    def body(
        self, model: str, messages: Sequence[Payload], tools: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Payload:
        """System messages are a field of their own; messages of one role in a row become one."""
        system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
        body: Payload = {
            "model": model,
            "messages": _merged([message for message in messages if message["role"] != "system"]),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if system:
            body["system"] = system
        if tools:
            body["tools"] = [_tool(declaration["function"]) for declaration in tools]
            body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
        return body

    def opening(self, messages: Sequence[Message]) -> list[Payload]:
        """Role and content."""
        return [{"role": message.role, "content": message.content} for message in messages]

    def written(self, text: str, calls: Sequence[Call]) -> Payload:
        """An assistant's message of text and `tool_use` blocks."""
        blocks: list[Payload] = [{"type": "text", "text": text}] if text.strip() else []
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)} for call in calls
        ]
        return {"role": "assistant", "content": blocks or [{"type": "text", "text": "(no text)"}]}

    def observation(self, turn: Payload, text: str) -> list[Payload]:
        """A user's message: `tool_result` blocks, or text."""
        ids = [str(block["id"]) for block in turn["content"] if block["type"] == "tool_use"]
        if not ids:
            return [{"role": "user", "content": text}]
        said = [text, *[NOT_CARRIED_OUT] * (len(ids) - 1)]
        blocks = [
            {"type": "tool_result", "tool_use_id": key, "content": words} for key, words in zip(ids, said, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    def whole(self, events: Sequence[Payload]) -> Payload:
        """Blocks grown by their deltas; usage of the start and of the end."""
        blocks: dict[int, Payload] = {}
        usage: Payload = {}
        stop = None
        ended = False
        try:
            for event in events:
                kind = event.get("type")
                if kind == "message_start":
                    usage |= event["message"].get("usage") or {}
                elif kind == "content_block_start":
                    blocks[int(event["index"])] = dict(event["content_block"])
                elif kind == "content_block_delta":
                    _grow(blocks[int(event["index"])], event["delta"])
                elif kind == "message_delta":
                    stop = event["delta"].get("stop_reason") or stop
                    usage |= {key: value for key, value in (event.get("usage") or {}).items() if value is not None}
                ended |= kind == "message_stop"
        except (LookupError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise EndpointGarbled(f"an event of the stream is none of a message ({error!r})") from error
        if stop is None or not ended:
            raise EndpointCut(f"the stream stopped after {len(events)} events without a message_stop")
        return {"content": [blocks[index] for index in sorted(blocks)], "stop_reason": stop, "usage": usage}

    def read(self, payload: Payload) -> Answer:
        """All blocks of it."""
        try:
            blocks = [_plain(block) for block in payload["content"]]
            text = "".join(block["text"] for block in blocks if block["type"] == "text")
            thinking = "\n".join(block["thinking"] for block in blocks if block["type"] == "thinking")
            raw = [block for block in payload["content"] if block["type"] == "tool_use"]
            calls = tuple(Call(block["id"], block["name"], _arguments(block)) for block in raw)
            stop = payload["stop_reason"]
        except (LookupError, TypeError, AttributeError) as error:
            raise EndpointGarbled(f"the answer is no message ({error!r}): {str(payload)[:200]}") from error
        if not all(isinstance(part, str) for call in calls for part in (call.id, call.name)):
            raise EndpointGarbled(f"the id or name of a call is no text: {str(payload)[:200]}")
        content = [block for block in blocks if block["type"] != "text" or block["text"].strip()]
        message = {"role": "assistant", "content": content} if content else self.written("", ())
        return Answer(text, thinking, calls, stop == "max_tokens", _counts(payload), message)


def _grow(block: Payload, delta: Payload) -> None:
    field = _GROWING.get(delta["type"])
    if field is not None:
        block[field] = block.get(field, "") + delta[field]


def _plain(block: Payload) -> Payload:
    """A block as it may be sent back: the input of a call as an object, whatever pieces it came in."""
    if block["type"] != "tool_use":
        return block
    return {"type": "tool_use", "id": block["id"], "name": block["name"], "input": _object(_arguments(block))}


def _arguments(block: Payload) -> str:
    return str(block["partial_json"]) if block.get("partial_json") else json.dumps(block.get("input") or {})


def _object(arguments: str) -> Payload:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return {"malformed": arguments}
    return value if isinstance(value, dict) else {"malformed": arguments}


def _tool(function: Mapping[str, Any]) -> Payload:
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


def _merged(messages: Sequence[Payload]) -> list[Payload]:
    merged: list[Payload] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1] = {**message, "content": _blocks(merged[-1]["content"]) + _blocks(message["content"])}
        else:
            merged.append(message)
    return merged


def _blocks(content: Any) -> list[Payload]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _counts(payload: Payload) -> Counts | None:
    """What was read is counted in three parts: fresh, written to the cache, and out of the cache."""
    usage = payload.get("usage")
    if not isinstance(usage, dict):
        return None
    fresh, completion = count(usage.get("input_tokens")), count(usage.get("output_tokens"))
    if fresh is None or completion is None:
        return None
    cached = count(usage.get("cache_read_input_tokens")) or 0
    return Counts(fresh + cached + (count(usage.get("cache_creation_input_tokens")) or 0), cached, completion)
