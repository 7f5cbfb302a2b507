"""The environment protocol. A user's own environment implements `Environment` and `Suite`, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepswe.types import Grade, Message, ToolCall


class HasId(Protocol):
    """A task, for all that the loop cares."""

    @property
    def id(self) -> str:
        """Unique in its suite."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one turn led to.

    Attributes:
        observation: text for the model; ignored when `done`.
        done: the attempt is submitted.
        call: the parsed call, for the record.
        error: the kind of the model's mistake, "" if none.
    """

    observation: str
    done: bool = False
    call: ToolCall | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grade and what was graded (for a SWE task: the diff)."""

    grade: Grade
    artifact: str = ""


class Environment(Protocol):
    """One attempt at one task. Single-use: `start`, `act` until done, `finish`, `close`; there is no reset.

    Every method may raise a `DeepsweError`, which ends the attempt as `Ending.ERROR` without a reward.
    A mistake of the model is an `Outcome` with an observation that says what to do, never an exception.
    """

    async def start(self) -> Sequence[Message]:
        """Acquire what the attempt needs; return the opening messages."""
        ...

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        """Carry out the turn that the model wrote.

        Args:
            completion: the sampled text without its stop token.
            timeout_s: what remains of the attempt's time; an environment that is cut short says so in the outcome.
        """
        ...

    async def finish(self) -> Verdict:
        """Grade what was reached. Called once, whatever the ending, unless the environment itself failed."""
        ...

    async def close(self) -> None:
        """Release everything. Called exactly once, also after a failed or cancelled `start`; never raises."""
        ...


class Suite(Protocol):
    """A family of tasks and the way to open an environment for one of them.

    A class that inherits from this one need only have `split` and `open`.
    """

    def split(self, name: str) -> Sequence[HasId]:
        """The tasks of a split ("train", "heldout", ...), in a fixed order; empty if there is none of that name."""
        ...

    def open(self, task: Any, *, seed: int) -> Environment:
        """A new environment for one attempt."""
        ...

    def rehearse(self, task: Any, *, seed: int) -> Environment:
        """A new environment whose observations are those of `open`, but which need not grade; it may be cheaper."""
        return self.open(task, seed=seed)

    def corpus(self) -> Iterator[str]:
        """Texts of the training tasks from which a tokenizer can be trained; empty if there are none to give."""
        return iter(())

    def reference(self, task: Any, *, seed: int) -> Iterator[str] | None:
        """Completions of a reference solver, turn by turn, for imitation; None when there is no solver.

        A generator that is sent each observation: ``observation = yield completion``. It sees the answer, so it runs
        on training tasks only.
        """
        return None

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The declarations of the tools that its agent calls, as chat templates take them; empty if it has none."""
        return ()

    def describe(self, task: Any) -> Mapping[str, str]:
        """What reports group this task by, such as {"repo": ..., "kind": ...}."""
        return {}


class SuiteAround(Suite):
    """All that another suite is; a class that inherits changes what it has to."""

    def __init__(self, inner: Suite) -> None:
        self._inner = inner

    def split(self, name: str) -> Sequence[HasId]:
        """As the inner suite's."""
        return self._inner.split(name)

    def open(self, task: Any, *, seed: int) -> Environment:
        """As the inner suite\'s."""
        return self._inner.open(task, seed=seed)

    def rehearse(self, task: Any, *, seed: int) -> Environment:
        """As the inner suite\'s."""
        return self._inner.rehearse(task, seed=seed)

    def corpus(self) -> Iterator[str]:
        """As the inner suite\'s."""
        return self._inner.corpus()

    def reference(self, task: Any, *, seed: int) -> Iterator[str] | None:
        """As the inner suite\'s."""
        return self._inner.reference(task, seed=seed)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """As the inner suite\'s."""
        return self._inner.tools()

    def describe(self, task: Any) -> Mapping[str, str]:
        """As the inner suite\'s."""
        return self._inner.describe(task)
