"""Where the wall time of a run goes: the model, the sandboxes, the learner, or this package itself.

While the thread of the event loop computes, that is ours: parsing, rendering, recording, deciding. While it waits,
the time belongs to what it waits for: the learner if an update is under way, else the model if a turn is sampled, else
an environment if one is at work, and to nobody where none of them is. That last time is ours, too: tasks that are being
made, files, reports. So what is ours is counted at its most; what others compute meanwhile takes nothing from it, but
is told beside it: how much the event loop computed while a pass or an update was under way in another thread, and how
long that thread waited, for the event loop among others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

from deepswe.atomic import write_atomically
from deepswe.envs.base import Environment, Outcome, Suite, SuiteAround, Verdict
from deepswe.errors import RunError
from deepswe.policy.base import Completion, Policy, Sampling
from deepswe.types import Message

PROFILE = "profile.json"
"""Name of the file in a run directory."""
LATER = ("loop_beside_s", "waited_s")
"""Keys that the first version of this file did not have."""
Part = Literal["learner", "model", "sandbox"]
PARTS: tuple[Part, ...] = ("learner", "model", "sandbox")
"""In this order waiting is put down to them."""


Clock = Callable[[], float]
"""Seconds from some moment on."""


def clock_of_this_thread() -> Clock:
    """What the calling thread has computed, told to any thread; to no other where the system cannot (macOS)."""
    thread = threading.get_ident()
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: time.thread_time() if threading.get_ident() == thread else 0.0
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


class Profiler:
    """Adds up the wall time of one thread, that of the event loop, on which all its methods are called but `beside`.

    Args:
        wall: the machine's clock.
        cpu: what this thread has computed; by default its own clock.
        own: what the thread has computed that asks.
    """

    def __init__(
        self, wall: Clock = time.perf_counter, cpu: Clock | None = None, own: Clock = time.thread_time
    ) -> None:
        self._wall, self._cpu, self._own = wall, cpu or clock_of_this_thread(), own
        self._last = (wall(), self._cpu())
        self._beside, self._waited, self._lock = 0.0, 0.0, threading.Lock()
        self._in_flight: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._spent = dict.fromkeys((*PARTS, "loop", "alone"), 0.0)
        self._inside = {part: _Inside(self, part) for part in PARTS}

    def inside(self, part: Part) -> AbstractContextManager[None]:
        """That part is at work, also across awaits; any number of times at once."""
        return self._inside[part]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A pass of the engine or an update of the learner is under way; entered in the thread that computes it.

        What the event loop computes meanwhile costs no wall time, as far as that thread does not wait: for the lock of
        the interpreter, which one of the two has at a time, for a core, or for a GPU.
        """
        wall, loop, own = self._wall(), self._cpu(), self._own()
        try:
            yield
        finally:
            passed, computed, looped = self._wall() - wall, self._own() - own, self._cpu() - loop
            with self._lock:
                self._beside += looped
                self._waited += max(0.0, passed - computed)

    def count(self, part: Part, more: int) -> None:
        """From now on so many more calls of that part are under way."""
        before = self._in_flight[part]
        if not before or not before + more:  # else waiting is put down to the same part as before
            self._settle()
        self._in_flight[part] = before + more

    def row(self) -> dict[str, float]:
        """Seconds so far: wall_s; learner_s, model_s, sandbox_s and ours_s, which add up to it; of ours, loop_s (the
        event loop computed) and alone_s (nothing else was at work). Beside them, see `beside`: of loop_s,
        loop_beside_s, in which a pass or an update was under way in another thread; and waited_s, in which that thread
        waited."""
        self._settle()
        spent = self._spent
        return {
            "wall_s": sum(spent.values()),
            **{f"{part}_s": spent[part] for part in PARTS},
            "ours_s": spent["loop"] + spent["alone"],
            "loop_s": spent["loop"],
            "alone_s": spent["alone"],
            "loop_beside_s": min(self._beside, spent["loop"]),
            "waited_s": self._waited,
        }

    def _settle(self) -> None:
        wall, cpu = self._wall(), self._cpu()
        passed = wall - self._last[0]
        computed = min(cpu - self._last[1], passed)
        self._last = (wall, cpu)
        self._spent["loop"] += computed
        self._spent[self._awaited] += passed - computed

    @property
    def _awaited(self) -> str:
        for part in PARTS:
            if self._in_flight[part]:
                return part
        return "alone"


class _Inside:
    """See `Profiler.inside`; one a part, since nothing is kept between enter and exit."""

    def __init__(self, profiler: Profiler, part: Part) -> None:
        self._profiler, self._part = profiler, part

    def __enter__(self) -> None:
        self._profiler.count(self._part, 1)

    def __exit__(self, *_: object) -> None:
        self._profiler.count(self._part, -1)


def write_profile(path: Path, row: Mapping[str, float]) -> dict[str, float]:
    """Write a profile, added to what earlier processes of the run wrote there; returns the whole with its shares.

    Raises:
        RunError: what is there is no profile.
    """
    whole = dict(row)
    if path.exists():
        try:
            before = {**dict.fromkeys(LATER, 0.0), **json.loads(path.read_text(encoding="utf-8"))}
            whole = {name: seconds + float(before[name]) for name, seconds in row.items()}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RunError(f"{path} is no profile ({error}); move it away") from error
    total = max(whole["wall_s"], 1e-9)
    shares = {f"{part}_share": whole[f"{part}_s"] / total for part in (*PARTS, "ours")}
    write_atomically(path, json.dumps({**whole, **shares}, indent=2) + "\n")
    return {**whole, **shares}


def describe_profile(row: Mapping[str, float]) -> str:
    """One line for people."""
    shares = ", ".join(f"{part} {100 * row[f'{part}_share']:.1f}%" for part in ("model", "sandbox", "learner", "ours"))
    return f"{row['wall_s']:.0f} s: {shares}"


class ProfiledPolicy:
    """A policy whose turns are counted as the model's time."""

    def __init__(self, policy: Policy, profiler: Profiler) -> None:
        self._policy, self._profiler = policy, profiler

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        """As the policy does."""
        with self._profiler.inside("model"):
            return await self._policy.generate(trajectory, stream, sampling, timeout_s=timeout_s)

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        """As the policy does."""
        async with self._policy.cohort(names, width=width):
            yield

    async def release(self, trajectory: str) -> None:
        """As the policy does."""
        await self._policy.release(trajectory)


class ProfiledSuite(SuiteAround):
    """A suite whose environments are counted as the sandboxes' time."""

    def __init__(self, suite: Suite, profiler: Profiler) -> None:
        super().__init__(suite)
        self._profiler = profiler

    def open(self, task: Any, *, seed: int) -> Environment:
        """The suite's environment, watched."""
        return _ProfiledEnvironment(super().open(task, seed=seed), self._profiler)

    def rehearse(self, task: Any, *, seed: int) -> Environment:
        """The suite's environment, watched."""
        return _ProfiledEnvironment(super().rehearse(task, seed=seed), self._profiler)


class _ProfiledEnvironment:
    def __init__(self, env: Environment, profiler: Profiler) -> None:
        self._env, self._profiler = env, profiler

    async def start(self) -> Sequence[Message]:
        with self._profiler.inside("sandbox"):
            return await self._env.start()

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        with self._profiler.inside("sandbox"):
            return await self._env.act(completion, timeout_s=timeout_s)

    async def finish(self) -> Verdict:
        with self._profiler.inside("sandbox"):
            return await self._env.finish()

    async def close(self) -> None:
        with self._profiler.inside("sandbox"):
            await self._env.close()
