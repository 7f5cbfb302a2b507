"""Evaluation of a model that somebody serves. Needs aiohttp (the extra `remote`)."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deepswe.config import EndpointConfig, Recipe
from deepswe.errors import ConfigError, DeepsweError, StoreError, boundary
from deepswe.jsonl import append_line, read_lines
from deepswe.policy.base import Policy, Renderer
from deepswe.policy.chat import ChatPolicy, Request
from deepswe.policy.chat_answer import Style
from deepswe.policy.chat_anthropic import AnthropicStyle
from deepswe.policy.chat_http import open_transport
from deepswe.policy.chat_openai import OpenAIStyle
from deepswe.policy.scripted import ByteRenderer
from deepswe.session.evaluate import Actor, Stage
from deepswe.shapes import misfit_in_record

STYLES: dict[str, Callable[[], Style]] = {"openai": OpenAIStyle, "anthropic": AnthropicStyle}
REQUESTS = "requests.jsonl"
MOST_DOLLARS = 1e12
"""More than any request can have cost."""


def endpoint_actor(config: EndpointConfig) -> Actor:
    """The model behind the recipe's endpoint.

    Raises:
        ConfigError: it has no url or no model, or the environment variable of its key is not set.
    """
    for name in ("url", "model"):
        if not getattr(config, name):
            raise ConfigError(f"endpoint.{name} is empty; set it in the recipe, or as endpoint.{name}=...")
    _check_url(config.url)
    key = os.environ.get(config.key_env, "") if config.key_env else ""
    if config.key_env and not key:
        raise ConfigError(f"endpoint.key_env names {config.key_env}, which is not set in the environment; export it")
    style = STYLES[config.style]()
    policies: list[ChatPolicy] = []

    @asynccontextmanager
    async def act(stage: Stage) -> AsyncIterator[tuple[Policy, Renderer]]:
        _check_honoured(stage.recipe)
        native = stage.recipe.agent.format == "native"
        url = config.url.rstrip("/") + style.path
        with _ledger(stage) as record:
            async with open_transport(url, style.headers(key)) as transport:
                policy = ChatPolicy(
                    config,
                    style,
                    transport,
                    tools=stage.opened.suite.tools() if native else (),
                    max_tokens=stage.recipe.rollout.max_tokens,
                    record=record,
                )
                policies.append(policy)
                yield policy, ByteRenderer()

    def fatal() -> DeepsweError | None:
        return next((policy.refused for policy in policies if policy.refused is not None), None)

    identity = {
        "kind": "endpoint",
        "url": config.url,
        "model": config.model,
        "style": config.style,
        "options": config.options,
        "max_dollars": config.max_dollars,
    }
    return Actor(config.model, identity, False, act, fatal)


def _check_url(url: str) -> None:
    """Refuse what is no address, before anything waits for an answer from it."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound or not url.isprintable() or " " in url:
        raise ConfigError(f"endpoint.url is {url!r}, which is no address; give one such as http://localhost:8000/v1")


def _check_honoured(recipe: Recipe) -> None:
    """Refuse what nobody can promise of a model that somebody else serves.

    Raises:
        ConfigError: the recipe asks for it.
    """
    if recipe.run.deterministic:
        raise ConfigError(
            "run.deterministic cannot be promised of an endpoint; leave it false, its seeds are sent anyway"
        )
    if not recipe.agent.thinking and not recipe.endpoint.options:
        raise ConfigError(
            "agent.thinking is false, which each server is told in its own way; say it in endpoint.options, such as "
            "options = {chat_template_kwargs = {enable_thinking = false}}"
        )


def _cost(line: bytes) -> tuple[str, float]:
    """The trajectory and the dollars of a line of the record.

    Raises:
        ValueError: it is no request.
    """
    row = json.loads(line)
    if wrong := misfit_in_record(row, {"trajectory": str, "usage": Mapping[str, Any] | None}):
        raise ValueError(wrong)
    usage = {"dollars": 0.0} if row["usage"] is None else row["usage"]
    if wrong := misfit_in_record(usage, {"dollars": float}, "usage"):
        raise ValueError(wrong)
    if not 0.0 <= usage["dollars"] <= MOST_DOLLARS:
        raise ValueError(f"usage.dollars is {usage['dollars']}")
    return row["trajectory"], usage["dollars"]


def spent(path: Path, phase: str) -> float:
    """Dollars that the answers of a phase have cost, by the record of requests; a torn last line is left out.

    Raises:
        StoreError: a line is no request, so that it is unknown what was spent.
    """
    costs = []
    for number, line in enumerate(read_lines(path)[0], start=1):
        try:
            trajectory, dollars = _cost(line) if line else ("", 0.0)
        except (ValueError, RecursionError) as error:
            raise StoreError(
                f"{path}:{number} is no request ({error}); repair the line, or take it out, and its cost is not counted"
            ) from error
        costs.append(dollars if trajectory.startswith(phase) else 0.0)
    return math.fsum(costs)


@contextmanager
def _ledger(stage: Stage) -> Iterator[Callable[[Request], None]]:
    """Appends every try of a request, and keeps the tally's account of it, earlier processes' included."""
    path, tally = stage.run / REQUESTS, stage.tally
    tally.dollars = spent(path, stage.batch.phase + "/")
    with boundary("evaluation.requests", StoreError):

        def record(request: Request) -> None:
            row = {"time_s": round(time.time(), 3), **asdict(request)}
            append_line(path, json.dumps(row, separators=(",", ":")).encode("ascii"))
            if request.usage is not None:
                tally.dollars += request.usage.dollars
            if request.outcome != "answered" and not tally.waiting_for:  # once, and again after the next answer
                stage.say(f"{stage.recipe.endpoint.url} does not answer ({request.outcome}); it is asked again")
            tally.waiting_for = "" if request.outcome == "answered" else request.outcome

        yield record
