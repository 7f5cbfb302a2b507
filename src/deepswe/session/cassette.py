"""Cassettes: what a run said to its model and to its environments, recorded once and played back without either.

A cassette is one JSONL file: a header, every turn of the model, every call of the renderer (unless the tokens are
bytes), everything that an environment was asked and answered (its sandbox and its grading with it), and the digest of
each trajectory. Played back, the same loop makes the same trajectories, times apart, and says where they would differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deepswe.envs.base import Environment, Outcome, Suite, SuiteAround, Verdict
from deepswe.errors import DeepsweError
from deepswe.policy.base import Completion, ObservationRole, Policy, Renderer, Sampling
from deepswe.policy.scripted import ByteRenderer
from deepswe.rollout.record import dump_trajectory
from deepswe.types import Message, Trajectory

VERSION = 1
Write = Callable[[Mapping[str, Any]], None]


class Recorder:
    """Writes a cassette; a context that owns the file. Lines are flushed as they come.

    Args:
        path: of the cassette; it must not exist yet.
        header: what playing it back needs to know.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._write({"kind": "header", "version": VERSION, **header})

    def suite(self, suite: Suite) -> Suite:
        """The suite, whose environments are recorded."""
        return _RecordedSuite(suite, self._write)

    def policy(self, policy: Policy) -> Policy:
        """The policy, whose turns are recorded."""
        return _RecordedPolicy(policy, self._write)

    def renderer(self, renderer: Renderer) -> Renderer:
        """The renderer, whose calls are recorded unless it is one of bytes."""
        kind = "bytes" if isinstance(renderer, ByteRenderer) else "calls"
        self._write({"kind": "renderer", "tokens": kind, "stop_tokens": sorted(renderer.stop_tokens)})
        return renderer if kind == "bytes" else _RecordedRenderer(renderer, self._write)

    def trajectory(self, trajectory: Trajectory) -> None:
        """What came of an attempt."""
        self._write(
            {
                "kind": "trajectory",
                "task": trajectory.task_id,
                "attempt": trajectory.attempt,
                "phase": trajectory.phase,
                "seed": trajectory.seed,
                "tags": dict(trajectory.tags),
                "digest": timeless_digest(trajectory),
            }
        )

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")).encode("ascii") + b"\n")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def timeless_digest(trajectory: Trajectory) -> str:
    """SHA-256 of a trajectory without its measured times."""
    steps = tuple(replace(step, generation_s=0.0, environment_s=0.0) for step in trajectory.steps)
    return hashlib.sha256(dump_trajectory(replace(trajectory, steps=steps, wall_s=0.0))).hexdigest()


def stream_digest(stream: Sequence[int]) -> str:
    """Of the tokens that a policy was given."""
    return hashlib.sha256(json.dumps(list(stream)).encode()).hexdigest()[:32]


def call_digest(method: str, *arguments: Any) -> str:
    """Of one call of a renderer."""
    return hashlib.sha256(json.dumps([method, *arguments]).encode()).hexdigest()[:32]


def messages_rows(messages: Sequence[Message]) -> list[list[str]]:
    """As plain values."""
    return [[message.role, message.content] for message in messages]


class _RecordedPolicy:
    def __init__(self, policy: Policy, write: Write) -> None:
        self._policy, self._write = policy, write

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        row: dict[str, Any] = {"kind": "turn", "trajectory": trajectory, "stream": stream_digest(stream)}
        try:
            completion = await self._policy.generate(trajectory, stream, sampling, timeout_s=timeout_s)
        except DeepsweError as error:
            self._write({**row, "error": error_row(error)})
            raise
        self._write({**row, "completion": asdict(completion)})
        return completion

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        async with self._policy.cohort(names, width=width):
            yield

    async def release(self, trajectory: str) -> None:
        await self._policy.release(trajectory)


class _RecordedRenderer:
    def __init__(self, renderer: Renderer, write: Write) -> None:
        self._renderer, self._write = renderer, write
        self._seen: set[str] = set()
        self.stop_tokens = renderer.stop_tokens

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self._noted(self._renderer.opening(messages), "opening", messages_rows(messages)))

    def observation(
        self, text: str, *, role: ObservationRole | None = None, truncated: bool = False
    ) -> tuple[int, ...]:
        made = self._renderer.observation(text, role=role, truncated=truncated)
        return tuple(self._noted(made, "observation", text, role, truncated))

    def completion(self, text: str) -> tuple[int, ...]:
        return tuple(self._noted(self._renderer.completion(text), "completion", text))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._noted(self._renderer.decode(tokens), "decode", list(tokens)))

    def read_observation(self, tokens: Sequence[int]) -> str:
        return str(self._noted(self._renderer.read_observation(tokens), "read_observation", list(tokens)))

    def _noted(self, made: Any, method: str, *arguments: Any) -> Any:
        digest = call_digest(method, *arguments)
        if digest not in self._seen:
            self._seen.add(digest)
            self._write({"kind": "render", "call": digest, "made": made})
        return made


class _RecordedSuite(SuiteAround):
    """Environments of one task and seed are told apart by the order in which they are opened: tries of one attempt."""

    def __init__(self, suite: Suite, write: Write) -> None:
        super().__init__(suite)
        self._write = write
        self._opened: dict[tuple[str, int], int] = {}

    def open(self, task: Any, *, seed: int) -> Environment:
        number = self._opened[task.id, seed] = self._opened.get((task.id, seed), -1) + 1
        key = environment_key(task.id, seed, number)
        return _RecordedEnvironment(super().open(task, seed=seed), key, self._write)


def environment_key(task_id: str, seed: int, number: int) -> str:
    """Names one environment of a run."""
    return f"{task_id}\x1f{seed}\x1f{number}"


def error_row(error: DeepsweError) -> dict[str, Any]:
    """A failure as plain values."""
    return {"class": type(error).__name__, "message": str(error), "place": error.place}


class _RecordedEnvironment:
    def __init__(self, environment: Environment, key: str, write: Write) -> None:
        self._environment, self._key, self._write = environment, key, write

    async def start(self) -> Sequence[Message]:
        async with self._noting("start") as row:
            messages = await self._environment.start()
            row["answer"] = messages_rows(messages)
        return messages

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        async with self._noting("act", completion) as row:
            outcome = await self._environment.act(completion, timeout_s=timeout_s)
            row["answer"] = asdict(outcome)
        return outcome

    async def finish(self) -> Verdict:
        async with self._noting("finish") as row:
            verdict = await self._environment.finish()
            row["answer"] = asdict(verdict)
        return verdict

    async def close(self) -> None:
        await self._environment.close()

    @asynccontextmanager
    async def _noting(self, method: str, *arguments: str) -> AsyncIterator[dict[str, Any]]:
        row: dict[str, Any] = {"kind": "environment", "key": self._key, "call": call_digest(method, *arguments)}
        try:
            yield row
        except DeepsweError as error:
            self._write({**row, "error": error_row(error)})
            raise
        self._write(row)
