"""vLLM servers as a policy: ids in, ids and log-probs out, over HTTP.

A trajectory stays with the server that has its prefix cached, unless that one has much more to do than another. What
was sampled when a server fails, or when the weights change, is kept, and the turn goes on elsewhere or under the new
weights: each request is made and answered under one version of the weights, so every token's version is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from deepswe.config import VllmConfig
from deepswe.errors import ConfigError, PolicyError
from deepswe.optional import optional_module
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.vllm_server import READ_BYTES, ServerFailed, VllmServer

RECOVER_S = 1.0
"""Between looks at servers that have failed."""
PATIENCE_S = 120.0
"""How long turns wait while no server answers."""
EXTRA_LOAD = 8
"""Requests that the server with a trajectory's cache may have above the others."""

InFlight = Literal["keep", "finish", "abort"]


@dataclass(slots=True, eq=False)
class _Turn:
    stream: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    leash: asyncio.Timeout | None = None

    def begin(self, version: int) -> None:
        """What comes now is sampled under this version."""
        if self.versions and self.versions[-1][0] == len(self.tokens):
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)

    def forget(self) -> None:
        self.tokens, self.logprobs, self.versions = [], [], []

    @property
    def finish(self) -> Literal["stop", "length"] | None:
        """Whether it is over already."""
        if self.tokens and self.tokens[-1] in self.sampling.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.sampling.max_tokens else None

    def complete(self, finish: Literal["stop", "length", "timeout"], version: int) -> Completion:
        first, *later = [entry for entry in self.versions if entry[0] < len(self.tokens)] or [(0, version)]
        return Completion(tuple(self.tokens), tuple(self.logprobs), finish, first[1], later=tuple(later))


KEPT_ALIVE_S = 3.0
"""An idle connection is not used again after this; uvicorn, which serves vLLM, closes it after 5 s."""


class VllmPolicy:
    """`Policy` over running servers; an async context, on one event loop.

    Args:
        config: the recipe's section; `servers` are asked at once when the context is entered.
        in_flight: what becomes of turns when the weights change, see `quiet`.

    Attributes:
        version: of the weights that are sampled from; set inside `quiet`.
        servers: all of them.
        recent: the beginning of a stream that was lately sampled from, for checks of the weights.
        refresh: puts the present weights into a server that has come back; without it, it is trusted to have them.
    """

    def __init__(self, config: VllmConfig, *, in_flight: InFlight = "keep") -> None:
        """Raises:
        ConfigError: no servers are named, or aiohttp is not installed.
        """
        if not config.servers:
            raise ConfigError(
                "engine.vllm.servers names no server; start some with `deepswe serve RECIPE`, and give what it prints"
            )
        self.config, self._in_flight = config, in_flight
        self._aiohttp: Any = optional_module("aiohttp", "vllm", "talk to vLLM servers")
        self.version = 0
        self.servers: list[VllmServer] = []
        self.recent: tuple[int, ...] = ()
        self.refresh: Callable[[VllmServer], Awaitable[None]] | None = None
        self._homes: dict[str, VllmServer] = {}
        self._flying: set[_Turn] = set()
        self._open, self._landed, self._recovered = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._open.set()
        self._changing = asyncio.Lock()
        self._last_failure = ""
        self._session: Any = None
        self._recovery: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Ask every server what it serves; those that do not answer are looked after until they do.

        Raises:
            PolicyError: none answers, or one serves no such model.
        """
        connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S)
        no_limit = self._aiohttp.ClientTimeout(total=None)
        self._session = self._aiohttp.ClientSession(connector=connector, timeout=no_limit, read_bufsize=READ_BYTES)
        self.servers = [VllmServer(address, self._session) for address in self.config.servers]
        asked = await asyncio.gather(
            *(server.inspect(self.config.model) for server in self.servers), return_exceptions=True
        )
        for server, failure in zip(self.servers, asked, strict=True):
            if isinstance(failure, ServerFailed):
                self._failed(server, failure)
            elif failure is not None:
                await self._session.close()
                raise failure
        if all(server.version is None for server in self.servers):
            await self._session.close()
            raise PolicyError(f"none of {len(self.servers)} vLLM servers answers; the last: {self._last_failure}")
        self._recovery = asyncio.create_task(self._recover())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            with suppress(asyncio.CancelledError, PolicyError):
                await self._recovery
        await self._session.close()

    @property
    def context(self) -> int:
        """Tokens of one request, answer included."""
        return min(server.context for server in self.servers if server.context)

    async def check_temperature(self, temperature: float) -> None:
        """Find out whether log-probs are those at the temperature of the sampling.

        Raises:
            PolicyError: a server gives those at temperature 1.
        """
        if temperature in (0.0, 1.0):
            return
        for server in self.servers:
            if server.version is None:
                continue
            seen: list[float] = []
            for value in (1.0, temperature):
                body = {**self._body([1, 2, 3], Sampling(1, value, frozenset(), 0), 1), "logprobs": 1}
                answer = await server.post("/v1/completions", {**body, "model": server.model, "stream": False})
                top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
                seen.append(max(top.values()))
            if abs(seen[0] - seen[1]) < 1e-4:
                raise PolicyError(
                    f"{server.address} gives log-probs at temperature 1 though it samples at {temperature}; start it "
                    "with --logprobs-mode processed_logprobs, or set rollout.temperature to 1"
                )

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        """Sample one turn. Cancelling the call, or its deadline, ends the request on the server, too.

        Raises:
            PolicyError: the stream is too long, a server refused it, or none answers after the retries.
        """
        room = self.context - len(stream)
        if room <= 0 or not stream:
            raise PolicyError(
                f"trajectory {trajectory!r} cannot be continued: {len(stream)} tokens of a context of {self.context}; "
                "lower rollout.max_tokens, or start the servers with a larger --max-model-len"
            )
        turn = _Turn(list(stream), sampling)
        failures = 0
        try:
            async with asyncio.timeout(timeout_s):
                while (finish := turn.finish) is None and len(turn.tokens) < room:
                    try:
                        said = await self._request(trajectory, turn)
                    except ServerFailed as error:
                        failures += 1
                        if failures > self.config.retries:
                            raise PolicyError(f"{failures} servers failed on one turn, the last: {error}") from error
                    else:
                        if said == "stop":
                            return turn.complete("stop", self.version)
                return turn.complete(finish or "length", self.version)
        except TimeoutError:
            return turn.complete("timeout", self.version)
        finally:
            self.recent = tuple(turn.stream[:256])

    async def _request(self, trajectory: str, turn: _Turn) -> str:
        """One request under one version of the weights.

        Returns:
            why it ended: "stop", "length", or "abort", also where a change of the weights broke it off.
        """
        while True:
            await self._open.wait()
            server = await self._choose(trajectory)
            if self._open.is_set():
                break
        turn.begin(self.version)
        self._flying.add(turn)
        limit = min(turn.sampling.max_tokens, self.context - len(turn.stream)) - len(turn.tokens)
        try:
            async with asyncio.timeout(None) as turn.leash:
                body = self._body([*turn.stream, *turn.tokens], turn.sampling, limit)
                return await server.complete(body, turn.add, silence_s=self.config.silence_s)
        except TimeoutError:
            if turn.leash is None or not turn.leash.expired():
                raise
            if self._in_flight == "abort":
                turn.forget()
            return "abort"
        except ServerFailed as error:
            self._failed(server, error)
            raise
        finally:
            turn.leash = None
            self._flying.discard(turn)
            self._landed.set()

    def _body(self, prompt: list[int], sampling: Sampling, limit: int) -> dict[str, Any]:
        config = self.config
        return {
            "prompt": prompt,
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(sampling.stop_tokens),
            "ignore_eos": True,
            "skip_special_tokens": False,
            **({"return_token_ids": True} if config.echo else {}),
            **({"seed": (sampling.seed + len(prompt)) % (1 << 31)} if config.seeded else {}),
        }

    # Servers.

    async def _choose(self, trajectory: str) -> VllmServer:
        """The server with the trajectory's cache, or the one with the least to do."""
        while not (usable := [server for server in self.servers if server.version == self.version]):
            self._recovered.clear()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._recovered.wait()
            except TimeoutError as error:
                raise PolicyError(
                    f"none of {len(self.servers)} vLLM servers has answered for {PATIENCE_S:.0f} s; the last failure: "
                    f"{self._last_failure}"
                ) from error
        least = min(usable, key=lambda server: server.load)
        home = self._homes.get(trajectory)
        if home is None or home not in usable or home.load > least.load + EXTRA_LOAD:
            home = self._homes[trajectory] = least
        return home

    def _failed(self, server: VllmServer, error: PolicyError) -> None:
        """Nothing goes to it until it has been asked and has the present weights."""
        server.version, self._last_failure = None, str(error)

    async def _recover(self) -> None:
        """Look after servers that have failed, and take them in again."""
        while True:
            await asyncio.sleep(RECOVER_S)
            await self._open.wait()
            for server in self.servers:
                if server.version == self.version:
                    continue
                try:
                    async with self._changing:
                        await server.inspect(self.config.model)
                        if self.refresh is not None:
                            await self.refresh(server)
                        server.version = self.version
                except PolicyError as error:
                    self._last_failure = str(error)
                else:
                    self._recovered.set()

    # Weights.

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """No request is in flight inside, and none begins.

        Turns in flight are broken off and go on afterwards ("keep"), broken off and begun anew ("abort"), or finished
        first ("finish").

        Raises:
            PolicyError: they do not end in time.
        """
        async with self._changing:
            self._open.clear()
            try:
                await self._land()
                yield
            finally:
                self._open.set()

    async def _land(self) -> None:
        try:
            async with asyncio.timeout(self.config.update_timeout_s):
                while self._flying:
                    if self._in_flight != "finish":
                        for turn in self._flying:
                            if turn.leash is not None and not turn.leash.expired() and turn.leash.when() is None:
                                turn.leash.reschedule(asyncio.get_running_loop().time())
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError as error:
            raise PolicyError(
                f"{len(self._flying)} turns were still in flight {self.config.update_timeout_s:.0f} s after new "
                "weights came; set asynchrony.in_flight to keep, or raise engine.vllm.update_timeout_s"
            ) from error

    # What else a policy does.

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        """No lock-step here: the names are released at the end."""
        try:
            yield
        finally:
            for name in names:
                await self.release(name)

    async def release(self, trajectory: str) -> None:
        """The trajectory is over: it has no server any more. Cached prefixes go when a server needs the room."""
        self._homes.pop(trajectory, None)
