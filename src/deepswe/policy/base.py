"""The policy protocol: what the agent loop asks of any engine and of any renderer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from deepswe.types import Message, Usage

ObservationRole = Literal["user", "tool"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one turn.

    Attributes:
        max_tokens: at most this many new tokens.
        temperature: 0 is greedy (log-probs are then those at temperature 1).
        stop_tokens: ids that end the turn; the one that did is part of the completion.
        seed: with the same seed, stream and weights, the same tokens.
    """

    max_tokens: int
    temperature: float
    stop_tokens: frozenset[int]
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn.

    Attributes:
        tokens: new ids, the stop token included when there was one.
        logprobs: of each, under the distribution that was sampled from.
        finish: "stop" (a stop token), "length" (max_tokens) or "timeout" (deadline; tokens so far are returned). An
            engine that counts by itself also ends an attempt by "context" (no room is left in it) and "cost".
        version: the policy version that sampled them, or the first of them.
        later: where newer versions took over in mid-turn: (index of the first token, version), in order.
        usage: what a remote endpoint counted for the turn; None where `tokens` are the model's own.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "timeout", "context", "cost"]
    version: int
    usage: Usage | None = None
    later: tuple[tuple[int, int], ...] = ()

    def by_version(self) -> tuple[tuple[tuple[int, ...], tuple[float, ...], int], ...]:
        """(tokens, log-probs, version) of each stretch that one version sampled; one, unless there are `later`."""
        if not self.later:
            return ((self.tokens, self.logprobs, self.version),)
        starts = ((0, self.version), *self.later)
        ends = (*(index for index, _ in self.later), len(self.tokens))
        return tuple(
            (self.tokens[start:end], self.logprobs[start:end], version)
            for (start, version), end in zip(starts, ends, strict=True)
        )


class Policy(Protocol):
    """An engine. Many turns of many trajectories are in flight at once."""

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        """Sample one turn after `stream`.

        Args:
            trajectory: names the trajectory, so that an engine can keep its cache across turns.
            stream: all token ids of the trajectory so far. It only ever grows.
            sampling: how.
            timeout_s: after this the completion is what there is, with finish "timeout".

        Raises:
            PolicyError: the engine failed.
        """
        ...

    def cohort(self, names: Sequence[str], *, width: int = 0) -> AbstractAsyncContextManager[None]:
        """Announce trajectories that run together: ``async with policy.cohort(names): ...``.

        An engine that promises bit-identical batches needs it to run in lock-step: it then samples only when every
        live trajectory of the cohort has asked for a turn. A trajectory leaves by `release(name)`, which its owner
        calls exactly when it will never ask again. Other engines take it as a hint.

        Args:
            names: the trajectories, in the order in which they start.
            width: at most this many are in flight at once; 0 means all.
        """
        ...

    async def release(self, trajectory: str) -> None:
        """The trajectory is over; its cache may go. Unknown names are ignored."""
        ...


class Renderer(Protocol):
    """Messages to tokens, once: what was sampled is never tokenised again."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The ids that end a sampled turn."""
        ...

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of the conversation so far, ready for the first sampled turn."""
        ...

    def observation(
        self, text: str, *, role: ObservationRole | None = None, truncated: bool = False
    ) -> tuple[int, ...]:
        """The tokens to append after a sampled turn, ready for the next one.

        Args:
            text: what the environment answered.
            role: the role that says it; None leaves it to the renderer.
            truncated: the turn did not end in a stop token; the tokens then begin with the end of that turn.
        """
        ...

    def completion(self, text: str) -> tuple[int, ...]:
        """The tokens of a turn that was written by a script, its stop token included."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a sampled turn, without its stop token."""
        ...

    def read_observation(self, tokens: Sequence[int]) -> str:
        """The text that `observation` was given, read back from its tokens.

        Raises:
            PolicyError: the tokens are none of an observation.
        """
        ...
