"""What deepswe relies on in a vLLM server; the stand-in and a real one are held to it alike.

Each check takes a running server and raises AssertionError. Ids in prompts are below 60, which the toy of the stand-in
needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepswe.config import VllmConfig
from deepswe.errors import PolicyError
from deepswe.policy.base import Sampling
from deepswe.policy.vllm import InFlight, VllmPolicy

PROMPT = [5, 17, 40, 3, 3, 21, 55, 8]
NEVER: frozenset[int] = frozenset()
LONG = 400
"""Tokens of a turn that something happens to meanwhile."""


@dataclass(frozen=True)
class Subject:
    """A server under test.

    Attributes:
        address: where it is.
        weights: two directories of weights that it can load; it starts with neither or the first.
        pace_s: about what one token takes.
    """

    address: str
    weights: tuple[Path, Path]
    pace_s: float


def greedy(tokens: int, stop: frozenset[int] = NEVER) -> Sampling:
    return Sampling(tokens, 0.0, stop, 0)


def policy(subject: Subject, in_flight: InFlight = "keep", **options: object) -> VllmPolicy:
    config = VllmConfig.model_validate({"servers": (subject.address,), "echo": True, **options})
    return VllmPolicy(config, in_flight=in_flight)


async def ids_are_read_as_sent(subject: Subject) -> None:
    # `echo` compares the ids that the server read; the continuation is the same in one request and in two.
    async with policy(subject) as engine:
        whole = await engine.generate("a", PROMPT, greedy(12), timeout_s=60)
        part = await engine.generate("b", PROMPT, greedy(5), timeout_s=60)
        rest = await engine.generate("b", [*PROMPT, *part.tokens], greedy(7), timeout_s=60)
    assert (whole.finish, part.finish) == ("length", "length")
    assert part.tokens + rest.tokens == whole.tokens
    assert len(whole.logprobs) == 12
    assert all(value <= 1e-6 for value in whole.logprobs)


async def a_stop_token_ends_the_turn_and_is_part_of_it(subject: Subject) -> None:
    async with policy(subject) as engine:
        free = await engine.generate("a", PROMPT, greedy(8), timeout_s=60)
        stop = free.tokens[3]
        first = free.tokens.index(stop)
        done = await engine.generate("b", PROMPT, greedy(8, frozenset({stop})), timeout_s=60)
    assert done.finish == "stop"
    assert done.tokens == free.tokens[: first + 1]


async def log_probs_are_those_of_what_was_sampled(subject: Subject) -> None:
    async with policy(subject) as engine:
        sampled = await engine.generate("a", PROMPT, Sampling(16, 1.0, NEVER, 1), timeout_s=60)
        scored = await engine.servers[0].score([*PROMPT, *sampled.tokens])
    tail = scored[len(PROMPT) - 1 :]
    assert max(abs(a - b) for a, b in zip(tail, sampled.logprobs, strict=True)) < 0.1


async def a_deadline_gives_what_there_is_and_frees_the_server(subject: Subject) -> None:
    async with policy(subject) as engine:
        begun = time.monotonic()
        cut = await engine.generate("a", PROMPT, greedy(2000), timeout_s=40 * subject.pace_s)
        assert time.monotonic() - begun < 40 * subject.pace_s + 5
        assert cut.finish == "timeout"
        assert 0 < len(cut.tokens) < 2000
        assert len(cut.tokens) == len(cut.logprobs)
        await until(lambda: running(engine, 0))


async def running(engine: VllmPolicy, wanted: int) -> bool:
    async with engine._session.get(f"{engine.servers[0].address}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running")]
    return sum(found) == wanted


async def pace(engine: VllmPolicy) -> float:
    """Seconds that a token takes."""
    begun = time.monotonic()
    await engine.generate("pace", PROMPT, greedy(40), timeout_s=120)
    return (time.monotonic() - begun) / 40


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def load(engine: VllmPolicy, weights: Path, version: int) -> None:
    async with engine.quiet():
        for server in engine.servers:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
            await server.post("/collective_rpc", body, timeout_s=120)
            await server.post("/reset_prefix_cache")
            server.version = version
        engine.version = version


async def new_weights_give_other_log_probs_and_old_ones_the_same(subject: Subject) -> None:
    first, second = subject.weights
    async with policy(subject) as engine:
        scores = []
        for version, weights in enumerate((first, second, first), start=1):
            await load(engine, weights, version)
            scores.append(await engine.servers[0].score(PROMPT))
            done = await engine.generate("a", PROMPT, greedy(2), timeout_s=60)
            assert done.version == version
    assert scores[0] == pytest.approx(scores[2], abs=1e-4)
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)


async def a_turn_in_flight_is_kept_across_a_change_and_knows_both_versions(subject: Subject) -> None:
    first, second = subject.weights
    async with policy(subject) as engine:
        await load(engine, first, 1)
        token_s = await pace(engine)
        turn = asyncio.create_task(engine.generate("a", PROMPT, Sampling(LONG, 1.0, NEVER, 1), timeout_s=120))
        await asyncio.sleep(token_s * LONG / 6)
        await load(engine, second, 2)
        done = await turn
        parts = done.by_version()
        assert [version for _, _, version in parts] == [1, 2], "the turn was over before the change, or not begun"
        assert sum(len(tokens) for tokens, _, _ in parts) == len(done.tokens)
        scored = await engine.servers[0].score([*PROMPT, *done.tokens])
    old = len(parts[0][0])
    tail = scored[len(PROMPT) - 1 + old :]
    assert max(abs(a - b) for a, b in zip(tail, done.logprobs[old:], strict=True)) < 0.1


async def a_turn_in_flight_is_finished_or_begun_anew_where_that_is_asked(subject: Subject) -> None:
    modes: tuple[tuple[InFlight, int], ...] = (("finish", 1), ("abort", 2))
    for mode, version in modes:
        async with policy(subject, mode) as engine:
            await load(engine, subject.weights[0], 1)
            token_s = await pace(engine)
            turn = asyncio.create_task(engine.generate("a", PROMPT, Sampling(LONG, 1.0, NEVER, 1), timeout_s=120))
            await asyncio.sleep(token_s * LONG / 6)
            await load(engine, subject.weights[1], 2)
            done = await turn
            assert [seen for _, _, seen in done.by_version()] == [version]


async def what_it_cannot_do_is_one_clear_error(subject: Subject) -> None:
    async with policy(subject) as engine:
        with pytest.raises(PolicyError, match="context of"):
            await engine.generate("a", [1] * engine.context, greedy(1), timeout_s=60)
        with pytest.raises(PolicyError, match="has no /no_such_thing"):
            await engine.servers[0].post("/no_such_thing")
    with pytest.raises(PolicyError, match="name one of them"):
        async with policy(subject, model="another"):
            pass


CHECKS: Sequence[Callable[[Subject], Awaitable[None]]] = (
    ids_are_read_as_sent,
    a_stop_token_ends_the_turn_and_is_part_of_it,
    log_probs_are_those_of_what_was_sampled,
    a_deadline_gives_what_there_is_and_frees_the_server,
    new_weights_give_other_log_probs_and_old_ones_the_same,
    a_turn_in_flight_is_kept_across_a_change_and_knows_both_versions,
    a_turn_in_flight_is_finished_or_begun_anew_where_that_is_asked,
    what_it_cannot_do_is_one_clear_error,
)
