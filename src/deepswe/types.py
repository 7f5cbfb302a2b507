"""The vocabulary: what moves between the parts of the system. Plain frozen data; no behaviour beyond derived views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, before it becomes tokens."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asked for. Argument values are exact: no stripping, no unescaping."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of tokens in the append-only stream of a trajectory.

    Attributes:
        tokens: ids, in order.
        sampled: whether the policy sampled them. Only sampled tokens are ever trained.
        logprobs: the sampler's log-probability of each token, at the temperature it sampled with; empty unless sampled.
        version: the policy version that sampled them (number of optimiser updates so far).
    """

    tokens: tuple[int, ...]
    sampled: bool
    logprobs: tuple[float, ...] = ()
    version: int = 0

    def __post_init__(self) -> None:
        if len(self.logprobs) != (len(self.tokens) if self.sampled else 0):
            raise ValueError(
                f"a span of {len(self.tokens)} tokens (sampled={self.sampled}) has {len(self.logprobs)} log-probs"
            )


class Ending(StrEnum):
    """Why a trajectory stopped. `ERROR` is a failure of the infrastructure, never of the policy."""

    SUBMITTED = "submitted"
    MAX_STEPS = "max_steps"
    MAX_CONTEXT = "max_context"
    GENERATION_TIMEOUT = "generation_timeout"
    ENV_TIMEOUT = "env_timeout"
    MAX_COST = "max_cost"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Graded:
    """A verdict: the work was tested.

    Attributes:
        reward: in [0, 1]; 1 iff every selected F2P and P2P test has its expected status.
        statuses: full test id -> status ("passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing").
        reason: one sentence for a reader, empty when the reward is 1.
    """

    reward: float
    statuses: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    kind: Literal["graded"] = "graded"


@dataclass(frozen=True, slots=True)
class Ungraded:
    """No verdict: the infrastructure failed, or nothing was to be graded. Never a reward.

    Attributes:
        error: what failed, for a reader.
        place: the boundary it is attributed to, such as "sandbox.start".
    """

    error: str
    place: str = ""
    kind: Literal["ungraded"] = "ungraded"


Grade = Graded | Ungraded


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: what the model wrote, the call found in it, and what came back.

    Attributes:
        completion: the sampled text, decoded for readers only (training reads the spans).
        call: the parsed call, or None when there was none or it could not be read.
        observation: what the environment answered; empty after the last turn.
        error: the kind of mistake the model made in this turn ("" if none), such as "no_call" or "unknown_tool".
        generation_s, environment_s: wall seconds in the policy and in the environment.
    """

    completion: str
    call: ToolCall | None
    observation: str
    error: str = ""
    generation_s: float = 0.0
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What an endpoint of somebody else counted for one turn.

    Attributes:
        prompt: tokens that it read, those out of its cache included.
        cached: of these, the ones out of its cache.
        completion: tokens that it sampled, thinking included.
        dollars: at the recipe's prices.
        estimated: the counts are our own, because its own were missing or impossible.
    """

    prompt: int
    cached: int
    completion: int
    dollars: float = 0.0
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at one task, whole: the token stream, the turns, how it ended and what it was worth.

    Attributes:
        task_id, attempt: the key, together with `phase` and `step`. A retry after an infrastructure failure has the
            same key and replaces nothing: only the one that counts is recorded.
        phase: "imitation", "train" ("train_more1", ... for further draws of a step) or the name of an evaluation,
            such as "before_heldout".
        step: the training step (or 0) whose batch it belongs to.
        spans: the append-only stream. Concatenated, it is exactly what the engine saw.
        starts: where the history of a later turn was shortened (thinking stripped), the indices of the spans at which
            a new token sequence begins, with that turn's whole context as one span that is not sampled; see
            `sequences`.
        usage: what a remote endpoint counted, one entry a turn. Where there is any, the spans hold text as bytes, not
            the tokens of a model, and can never be trained; else it is empty.
        artifact: what the attempt produced; for a SWE task the unified diff that was graded and is submitted.
        seed: seeds this attempt's sampling.
        retries: infrastructure failures before this one.
        wall_s: from environment start to grade.
    """

    task_id: str
    attempt: int
    phase: str
    step: int
    spans: tuple[TokenSpan, ...]
    steps: tuple[Step, ...]
    ending: Ending
    grade: Grade
    artifact: str = ""
    error: str = ""
    seed: int = 0
    retries: int = 0
    wall_s: float = 0.0
    tags: Mapping[str, str] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    usage: tuple[Usage, ...] = ()

    @property
    def sequences(self) -> tuple[tuple[TokenSpan, ...], ...]:
        """The spans of each token sequence that the engine saw: one, unless the history was shortened on the way."""
        bounds = (0, *self.starts, len(self.spans))
        return tuple(self.spans[first:end] for first, end in pairwise(bounds))

    @property
    def key(self) -> tuple[str, int, str, int]:
        """(phase, step, task_id, attempt): unique in a store."""
        return (self.phase, self.step, self.task_id, self.attempt)

    @property
    def reward(self) -> float | None:
        """The reward, or None where there is no verdict."""
        return self.grade.reward if isinstance(self.grade, Graded) else None

    @property
    def length(self) -> int:
        """Tokens in the stream, of all its sequences; of the last conversation where an endpoint counted them."""
        if self.usage:
            return max(turn.prompt + turn.completion for turn in self.usage)
        return sum(len(span.tokens) for span in self.spans)

    @property
    def sampled_length(self) -> int:
        """Tokens that the policy sampled, by the endpoint's counts where there was one."""
        if self.usage:
            return sum(turn.completion for turn in self.usage)
        return sum(len(span.tokens) for span in self.spans if span.sampled)
