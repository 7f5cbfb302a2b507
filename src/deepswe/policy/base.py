"""The policy protocol: what the agent loop asks of any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deepswe.types import Message


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
        finish: "stop" (a stop token), "length" (max_tokens) or "timeout" (deadline; tokens so far are returned).
        version: the policy version that sampled them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "timeout"]
    version: int


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

    async def release(self, trajectory: str) -> None:
        """The trajectory is over; its cache may go. Unknown names are ignored."""
        ...


class Renderer(Protocol):
    """Between messages and tokens. Only what was not sampled is ever tokenised (law 1)."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end a turn."""
        ...

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The stream's first tokens, up to the point where the model's first turn begins."""
        ...

    def observation(self, text: str, *, stopped: bool) -> tuple[int, ...]:
        """The tokens from the end of a sampled turn to the point where the next one begins.

        Args:
            text: what the environment answered.
            stopped: whether the turn ended with a stop token; if not, one is put in front, as not sampled.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a sampled turn, without its stop token."""
        ...
