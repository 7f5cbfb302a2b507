"""Playing a cassette back: the same loop, with a model and with environments that only answer what is on the tape."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepswe import errors
from deepswe.config import Recipe, build_recipe
from deepswe.envs.base import Environment, HasId, Outcome, Suite, Verdict
from deepswe.errors import ConfigError, DeepsweError, EnvironmentFault, PolicyError
from deepswe.policy.base import Completion, ObservationRole, Renderer, Sampling
from deepswe.policy.scripted import ByteRenderer
from deepswe.regular import read_regular
from deepswe.rollout.attempt import Attempt
from deepswe.rollout.scheduler import Scheduler
from deepswe.session.cassette import (
    VERSION,
    call_digest,
    environment_key,
    messages_rows,
    stream_digest,
    timeless_digest,
)
from deepswe.session.evaluate import Listed, within_limits
from deepswe.session.interrupt import run_to_end
from deepswe.shapes import misfit_in_record
from deepswe.types import Graded, Message, ToolCall, Trajectory, Ungraded, Usage

Row = dict[str, Any]

_ROWS: Mapping[str | None, Mapping[str, Any]] = {
    "header": {"recipe": Mapping[str, Any], "temperature": float, "counts_tokens": bool},
    "renderer": {"stop_tokens": tuple[int, ...], "tokens": str},
    "turn": {"trajectory": str, "stream": str},
    "render": {"call": str, "made": Any},
    "environment": {"key": str, "call": str},
    "trajectory": {
        "task": str,
        "attempt": int,
        "phase": str,
        "seed": int,
        "tags": Mapping[str, str],
        "digest": str,
    },
}
"""What a line of each kind has."""


@dataclass(slots=True)
class Tape:
    """A cassette in memory: each answer is taken once, in order.

    Attributes:
        header: of the file.
        stop_tokens, text: of the renderer; whether its tokens are bytes.
        turns, environments: by name of the trajectory, and by key of the environment.
        renders: digest of a call -> what it made.
        expected: of each recorded attempt.
    """

    header: Row
    stop_tokens: frozenset[int] = frozenset()
    text: bool = True
    turns: dict[str, deque[Row]] = field(default_factory=lambda: defaultdict(deque))
    environments: dict[str, deque[Row]] = field(default_factory=lambda: defaultdict(deque))
    renders: dict[str, Any] = field(default_factory=dict)
    expected: list[Row] = field(default_factory=list)

    def take(self, row: Row) -> None:
        """Add a line of the file."""
        match row["kind"]:
            case "turn":
                self.turns[row["trajectory"]].append(row)
            case "environment":
                self.environments[row["key"]].append(row)
            case "render":
                self.renders[row["call"]] = row["made"]
            case "renderer":
                self.stop_tokens, self.text = frozenset(row["stop_tokens"]), row["tokens"] == "bytes"
            case "trajectory":
                self.expected.append(row)


@dataclass(frozen=True, slots=True)
class Played:
    """What came of playing.

    Attributes:
        trajectories: made again.
        different: "TASK/ATTEMPT" of those that are not, times apart, what was recorded; with the error if there is one.
    """

    trajectories: tuple[Trajectory, ...]
    different: tuple[str, ...]


def load_tape(path: Path) -> Tape:
    """Read a cassette; a torn last line (the recording was killed) is left out.

    Raises:
        ConfigError: it is none.
    """
    try:
        lines = read_regular(path).splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
        if not rows:
            raise ValueError("it has not one whole line")
        tape = Tape(rows[0])
        if wrong := misfit_in_record(rows[0], {"kind": str, "version": int}, "line 1"):
            raise ValueError(wrong)
        if rows[0]["kind"] != "header" or rows[0]["version"] != VERSION:
            raise ConfigError(f"{path} is a cassette of version {rows[0].get('version')!r}; this reads {VERSION}")
        for number, row in enumerate(rows, start=1):
            kind = row.get("kind") if isinstance(row, dict) else None
            if wrong := misfit_in_record(row, {"kind": str, **_ROWS.get(kind, {})}, f"line {number}"):
                raise ValueError(wrong)
            if kind not in _ROWS:
                raise ValueError(f"line {number} is of the unknown kind {kind!r}")
            tape.take(row)
    except (OSError, ValueError, LookupError, RecursionError) as error:
        raise ConfigError(f"{path} is no cassette ({error}); make one with deepswe eval --record") from error
    return tape


def play(path: Path) -> Played:
    """Make the recorded attempts again, one after the other.

    Raises:
        ConfigError: the file is no cassette, or holds no attempt.
    """
    tape = load_tape(path)
    if not tape.expected:
        raise ConfigError(f"{path} holds no attempt that came to an end")
    recipe = build_recipe(tape.header["recipe"], origin=str(path))
    made = run_to_end(_collect(tape, recipe))
    digests = {(row["task"], row["attempt"]): row["digest"] for row in tape.expected}
    different = tuple(
        f"{t.task_id}/{t.attempt}" + (f": {t.error}" if t.error else "")
        for t in made
        if timeless_digest(t) != digests[t.task_id, t.attempt]
    )
    return Played(made, different)


async def _collect(tape: Tape, recipe: Recipe) -> tuple[Trajectory, ...]:
    listed = tuple(
        (
            _TapedTask(row["task"], row["tags"]),
            Attempt(row["task"], row["attempt"], row["phase"], 0, row["seed"], tape.header["temperature"]),
        )
        for row in tape.expected
    )
    renderer: Renderer = ByteRenderer() if tape.text else _PlayedRenderer(tape)
    scheduler = Scheduler(
        _PlayedSuite(tape),
        _PlayedPolicy(tape),
        renderer,
        rollout=within_limits(recipe, counts_tokens=tape.header["counts_tokens"]),
        agent=recipe.agent,
        concurrency=1,
        seed=recipe.run.seed,
    )
    made: list[Trajectory] = []
    batch = Listed(listed[0][1].phase, 0, (), 0, tape.header["temperature"], listed=listed)
    return await scheduler.collect(batch, record=made.append)


@dataclass(frozen=True, slots=True)
class _TapedTask:
    id: str
    tags: Mapping[str, str]


def _raise(row: Row) -> None:
    """The failure that was recorded, if there was one."""
    if "error" not in row:
        return
    known = getattr(errors, row["error"]["class"], DeepsweError)
    failure: DeepsweError = known(row["error"]["message"])
    failure.place = row["error"]["place"]
    raise failure


class _PlayedPolicy:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        waiting = self._tape.turns[trajectory]
        if not waiting:
            raise PolicyError(f"the cassette has no further turn of {trajectory}")
        row = waiting.popleft()
        if row["stream"] != stream_digest(stream):
            raise PolicyError(f"the cassette has another conversation before this turn of {trajectory}")
        _raise(row)
        said = row["completion"]
        return Completion(
            tuple(said["tokens"]),
            tuple(said["logprobs"]),
            said["finish"],
            said["version"],
            said["usage"] and Usage(**said["usage"]),
            tuple((index, version) for index, version in said["later"]),
        )

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        yield

    async def release(self, trajectory: str) -> None:
        pass


class _PlayedRenderer:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.stop_tokens = tape.stop_tokens

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self._made("opening", messages_rows(messages)))

    def observation(
        self, text: str, *, role: ObservationRole | None = None, truncated: bool = False
    ) -> tuple[int, ...]:
        return tuple(self._made("observation", text, role, truncated))

    def completion(self, text: str) -> tuple[int, ...]:
        return tuple(self._made("completion", text))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._made("decode", list(tokens)))

    def read_observation(self, tokens: Sequence[int]) -> str:
        return str(self._made("read_observation", list(tokens)))

    def _made(self, method: str, *arguments: Any) -> Any:
        digest = call_digest(method, *arguments)
        if digest not in self._tape.renders:
            raise PolicyError(f"the cassette has no such call of the renderer's {method}")
        return self._tape.renders[digest]


class _PlayedSuite(Suite):
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._opened: dict[tuple[str, int], int] = {}

    def split(self, name: str) -> Sequence[HasId]:
        return ()

    def open(self, task: Any, *, seed: int) -> Environment:
        number = self._opened[task.id, seed] = self._opened.get((task.id, seed), -1) + 1
        return _PlayedEnvironment(self._tape.environments[environment_key(task.id, seed, number)])

    def describe(self, task: _TapedTask) -> Mapping[str, str]:
        return task.tags


class _PlayedEnvironment:
    def __init__(self, rows: deque[Row]) -> None:
        self._rows = rows

    async def start(self) -> Sequence[Message]:
        return [Message(role, content) for role, content in self._answer("start")]

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        said = self._answer("act", completion)
        call = said["call"] and ToolCall(**said["call"])
        return Outcome(said["observation"], said["done"], call, said["error"])

    async def finish(self) -> Verdict:
        said = self._answer("finish")
        kind = Graded if said["grade"]["kind"] == "graded" else Ungraded
        return Verdict(kind(**said["grade"]), said["artifact"])

    async def close(self) -> None:
        pass

    def _answer(self, method: str, *arguments: str) -> Any:
        if not self._rows:
            raise EnvironmentFault(f"the cassette has no further answer of this environment, which was asked {method}")
        row = self._rows.popleft()
        if row["call"] != call_digest(method, *arguments):
            raise EnvironmentFault(f"the cassette has something else where the environment was asked {method}")
        _raise(row)
        return row["answer"]
