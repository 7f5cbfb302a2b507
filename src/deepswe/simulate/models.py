"""Models of engine, sandboxes, environment and learner. Tokens are counted in units (`Profile.unit`) to save memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from deepswe.algorithms.filters import age
from deepswe.envs.base import Environment, Outcome, Suite, Verdict
from deepswe.policy.base import Completion, ObservationRole, Sampling
from deepswe.sandbox.base import Sandbox, SandboxSpec
from deepswe.sandbox.memory import MemorySandbox
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.simulate.profile import Life, Lives, Profile
from deepswe.types import Graded, Message, Trajectory

SLICE_S = 20.0
"""How long a request keeps its speed before the load is looked at again."""
SEEDS = 1_000_003
"""The agent loop seeds turn n of an attempt with seed x this + n."""


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


@dataclass
class Gauge:
    """A number over time, and its mean."""

    value: float = 0.0
    area: float = 0.0
    since: float = 0.0

    def add(self, amount: float) -> None:
        """It changes now."""
        self.area += self.value * (now() - self.since)
        self.value, self.since = self.value + amount, now()

    def integral(self) -> float:
        """Value x seconds so far."""
        return self.area + self.value * (now() - self.since)


class SimulatedEngine:
    """`Policy` and `Updatable`: requests share what the GPUs sample; a change of weights pauses them all."""

    def __init__(self, profile: Profile, lives: Lives) -> None:
        self._profile, self._lives = profile, lives
        self.version = 0
        self.active = Gauge()
        self.tokens = 0
        self._open = asyncio.Event()
        self._open.set()
        self._pauses = 0

    @property
    def capacity(self) -> float:
        """Tokens a second at most."""
        profile = self._profile
        return (profile.gpus - profile.learner_gpus) * profile.decode_tokens_per_s

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        """The turn of the attempt's life, at the speed that the load allows."""
        unit = self._profile.unit
        attempt, turn = divmod(sampling.seed, SEEDS)
        turns = self._lives.of(attempt).turns
        tokens = max(1, turns[turn].tokens // unit) if turn < len(turns) else 1
        end = min(tokens, sampling.max_tokens)
        deadline = now() + timeout_s
        versions: list[tuple[int, int]] = []
        done, prefill = 0.0, min(len(stream), 4096 // unit) * unit / self._profile.prefill_tokens_per_s
        self.active.add(1)
        try:
            await asyncio.sleep(min(prefill, timeout_s))
            while done < end and now() < deadline:
                await self._open.wait()
                if not versions or versions[-1][1] != self.version:
                    versions.append((int(done), self.version))
                pauses = self._pauses
                rate = min(self._profile.request_tokens_per_s, self.capacity / self.active.value) / unit
                slice_s = min((end - done) / rate, SLICE_S, max(deadline - now(), 1e-3))
                await asyncio.sleep(slice_s)
                done = min(end, done + slice_s * rate + 1e-9)
                if self._pauses != pauses:  # it stood still for a change of weights meanwhile
                    await asyncio.sleep(self._profile.publish_s)
        finally:
            self.active.add(-1)
        whole = int(done)
        self.tokens += whole * unit
        finish = "timeout" if whole < end else "length" if end < tokens else "stop"
        first, *later = versions or [(0, self.version)]
        later = [(index, version) for index, version in later if index < whole]
        return Completion((0,) * whole, (0.0,) * whole, finish, first[1], later=tuple(later))  # type: ignore[arg-type]

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        """Nothing to do."""
        yield

    async def release(self, trajectory: str) -> None:
        """Nothing to do."""

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """GPUs that do both sample nothing inside."""
        if not self._profile.learner_gpus:
            self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def publish(self, version: int) -> Mapping[str, float]:
        """New weights, after the time that it takes to move them."""
        self._open.clear()
        self._pauses += 1
        await asyncio.sleep(self._profile.publish_s)
        self.version = version
        self._open.set()
        return {}


class SimulatedBackend:
    """Sandboxes that are only counted. `pool.Backend`."""

    def __init__(self) -> None:
        self.alive = Gauge()
        self._names: set[str] = set()

    async def start(self, name: str, spec: SandboxSpec, timeout_s: float) -> Sandbox:
        """After the seconds that its label says."""
        self._names.add(name)
        self.alive.add(1)
        await asyncio.sleep(min(float(spec.labels.get("start_s", 0.0)), timeout_s))
        return MemorySandbox()

    async def stop(self, name: str) -> None:
        """At once."""
        if name in self._names:
            self._names.remove(name)
            self.alive.add(-1)

    async def close(self) -> None:
        """End all."""
        for name in list(self._names):
            await self.stop(name)

    def abort(self) -> None:
        """End all without a loop."""
        self._names.clear()


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """A task of which only the name matters."""

    id: str


@dataclass(slots=True)
class SimulatedEnvironment:
    """One attempt in sandboxes of the pool, as its life has it."""

    pool: SandboxPool
    life: Life
    attempts: Gauge
    turn: int = 0
    held: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self) -> Sequence[Message]:
        """A sandbox, once the pool has a place."""
        self.attempts.add(1)
        await self._open(self.life.start_s)
        return [Message("user", str(self.life.prompt))]

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        """The tool's seconds; over after the last turn."""
        turn = self.life.turns[min(self.turn, len(self.life.turns) - 1)]
        self.turn += 1
        await asyncio.sleep(min(turn.tool_s, timeout_s))
        return Outcome(str(turn.observation), done=self.turn >= len(self.life.turns))

    async def finish(self) -> Verdict:
        """Graded in a fresh sandbox."""
        await self.held.aclose()
        await self._open(self.life.start_s)
        await asyncio.sleep(self.life.grade_s)
        return Verdict(Graded(self.life.reward))

    async def close(self) -> None:
        """Gives the sandbox back."""
        self.attempts.add(-1)
        await self.held.aclose()

    async def _open(self, start_s: float) -> None:
        self.held = AsyncExitStack()
        spec = SandboxSpec(limits=limits_of(self.pool.config), labels={"start_s": str(start_s)})
        await self.held.enter_async_context(self.pool.open(spec))


@dataclass(frozen=True, slots=True)
class SimulatedSuite(Suite):
    """So many tasks, each attempt as its life has it."""

    tasks: tuple[SimulatedTask, ...]
    pool: SandboxPool
    lives: Lives
    attempts: Gauge

    def split(self, name: str) -> Sequence[SimulatedTask]:
        """All tasks, whatever the split."""
        return self.tasks

    def open(self, task: Any, *, seed: int) -> Environment:
        """One attempt."""
        return SimulatedEnvironment(self.pool, self.lives.of(seed), self.attempts)


class UnitRenderer:
    """Prompts and observations are numbers of tokens, written out; `Renderer`."""

    stop_tokens = frozenset({1})

    def __init__(self, unit: int) -> None:
        self._unit = unit

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """As many units as the prompt says."""
        return self._units(messages[0].content)

    def observation(
        self, text: str, *, role: ObservationRole | None = None, truncated: bool = False
    ) -> tuple[int, ...]:
        """As many units as the text says."""
        return self._units(text.split("\n", 1)[0])

    def _units(self, number: str) -> tuple[int, ...]:
        return (0,) * max(1, int(number or 0) // self._unit)

    def completion(self, text: str) -> tuple[int, ...]:
        """One token."""
        return (0,)

    def decode(self, tokens: Sequence[int]) -> str:
        """Nothing."""
        return ""

    def read_observation(self, tokens: Sequence[int]) -> str:
        """Nothing."""
        return ""


class SimulatedLearner:
    """`Trains`: as many seconds as the tokens need; one update a step."""

    def __init__(self, profile: Profile) -> None:
        gpus = profile.learner_gpus or profile.gpus
        self._rate, self._fixed = gpus * profile.train_tokens_per_s / profile.unit, profile.train_fixed_s
        self.version = 0
        self.busy_s = 0.0
        self.ages: Counter[int] = Counter()

    def update(self, groups: Sequence[Sequence[Trajectory]], *, measure_start: bool = False) -> dict[str, float]:
        """One update; the seconds that it takes are the caller's to wait, see `in_virtual_thread`."""
        trained = [t for group in groups for t in group if t.sampled_length]
        self.ages.update(age(t, self.version) for t in trained)
        seconds = sum(t.length for t in trained) / self._rate + self._fixed
        self.busy_s += seconds
        self.version += 1
        return {"seconds": seconds, "entropy": 0.5, "updates": 1.0, "tokens": float(sum(t.length for t in trained))}


async def in_virtual_thread(function: Any, *args: Any, **options: Any) -> dict[str, float]:
    """Call it, and let the seconds pass that it says it took."""
    row: dict[str, float] = function(*args, **options)
    await asyncio.sleep(row["seconds"])
    return row
