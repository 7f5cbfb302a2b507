"""What a simulation assumes: how fast engine and learner are, and how long everything takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Protocol, Self

from pydantic import Field, model_validator

from deepswe.config import Fraction, PositiveFloat, Section, build_section, read_tree
from deepswe.errors import ConfigError
from deepswe.types import Ending, Trajectory

Speed = Annotated[float, Field(ge=1, le=1e9)]
"""Tokens a second; slower or faster than this a simulation would not end, or say nothing."""
Seconds = Annotated[float, Field(ge=0, le=1e7)]
Gpus = Annotated[int, Field(gt=0, le=1_000_000)]
MOST_TOKENS = 10_000_000
"""Of a prompt or an observation, which stand in the memory of this machine; what is drawn is cut there."""
MOST_TURNS = 10_000
"""Of an attempt; what is drawn is cut there."""


class Spread(Section):
    """A log-normal distribution, cut at `most`."""

    median: PositiveFloat
    sigma: float = Field(default=0.0, ge=0, le=10)
    most: float = Field(default=1e9, gt=0, le=1e9)

    def draw(self, chance: random.Random) -> float:
        """One value."""
        return min(self.median * math.exp(min(chance.gauss(0.0, self.sigma), 500.0)), self.most)


class Profile(Section):
    """The defaults are a model of 32B parameters on 64 H100, as in the DeepSWE write-up.

    Its 200 steps in six days are 43 minutes a step. The tail of the tool calls (`slowness`) is set so that a
    synchronous step of 512 attempts takes about that (2,540 s); the other figures are estimates.
    """

    unit: int = Field(default=32, gt=0, le=4096)
    """Tokens that are counted as one: the grain of a simulation against its memory."""
    gpus: Gpus = 64
    learner_gpus: int = Field(default=0, ge=0)
    """GPUs that only train; 0 lets all GPUs sample and train in turn."""
    decode_tokens_per_s: Speed = 700.0
    """A GPU's share of what the engine samples at most."""
    request_tokens_per_s: Speed = 40.0
    """One request, however few there are."""
    prefill_tokens_per_s: Speed = 4000.0
    """Of one request: what is new of its context."""
    train_tokens_per_s: Speed = 1350.0
    """A GPU's share of forward and backward: 256 GFLOP a token with recomputation, at 35% of 990 TFLOP/s."""
    train_fixed_s: Seconds = 30.0
    publish_s: Seconds = 15.0
    """One change of the engine's weights, during which it samples nothing."""
    prompt_tokens: int = Field(default=2500, gt=0, le=MOST_TOKENS)
    turns: Spread = Spread(median=34, sigma=0.35)
    turn_tokens: Spread = Spread(median=330, sigma=0.9, most=4096)
    observation_tokens: Spread = Spread(median=150, sigma=1.0, most=4000)
    tool_s: Spread = Spread(median=3.0, sigma=1.6, most=90.0)
    slowness: Spread = Spread(median=1.0, sigma=0.8)
    """Of all tool calls of one attempt: some repositories have slow tests."""
    start_s: Spread = Spread(median=15.0, sigma=0.6, most=300.0)
    grade_s: Spread = Spread(median=45.0, sigma=0.8, most=300.0)
    solve_rate: Fraction = 0.4

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.learner_gpus >= self.gpus:
            raise ValueError(f"learner_gpus {self.learner_gpus} leaves none of {self.gpus} gpus to sample")
        bounds = (("turns", self.turns, MOST_TURNS), ("observation_tokens", self.observation_tokens, MOST_TOKENS))
        for name, spread, bound in bounds:
            if spread.median > bound:
                raise ValueError(f"{name}.median is {spread.median:g}; at most {bound:,} can be simulated")
        return self


def load_profile(path: Path) -> Profile:
    """Read a profile from a TOML file.

    Raises:
        ConfigError: it cannot be read, or has a wrong key or value.
    """
    return build_section(Profile, read_tree(path, what="profile"), origin=f"profile {path}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an attempt: tokens sampled, seconds of the tool, tokens that it answered."""

    tokens: int
    tool_s: float
    observation: int


@dataclass(frozen=True, slots=True)
class Life:
    """All that will happen in one attempt unless a limit ends it. `prompt`: its tokens."""

    prompt: int
    turns: tuple[Turn, ...]
    start_s: float
    grade_s: float
    reward: float


class Lives(Protocol):
    """A life for each seed; the same for the same seed."""

    def of(self, seed: int) -> Life:
        """The life of the attempt with this seed."""
        ...


class DrawnLives:
    """Lives out of a profile's distributions."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._lately = lru_cache(1 << 15)(self._draw)

    def of(self, seed: int) -> Life:
        """See `Lives`."""
        return self._lately(seed)

    def _draw(self, seed: int) -> Life:
        profile, chance = self._profile, random.Random(seed)
        slowness = profile.slowness.draw(chance)

        def turns() -> Iterator[Turn]:
            for _ in range(min(MOST_TURNS, max(1, round(profile.turns.draw(chance))))):
                tool = min(profile.tool_s.draw(chance) * slowness, profile.tool_s.most)
                yield Turn(
                    max(1, round(profile.turn_tokens.draw(chance))),
                    tool,
                    min(MOST_TOKENS, round(profile.observation_tokens.draw(chance))),
                )

        return Life(
            profile.prompt_tokens,
            tuple(turns()),
            profile.start_s.draw(chance),
            profile.grade_s.draw(chance),
            float(chance.random() < profile.solve_rate),
        )


class RecordedLives:
    """Lives of a recorded run, drawn with replacement."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        """Take those that ran: errors are left out.

        Raises:
            ConfigError: there is none.
        """
        self._lives = [life_of(t) for t in trajectories if t.steps and t.ending is not Ending.ERROR]
        if not self._lives:
            raise ConfigError("the recorded run has no attempt with a turn to take times from; name another")

    def of(self, seed: int) -> Life:
        """See `Lives`."""
        return random.Random(seed).choice(self._lives)


def life_of(trajectory: Trajectory) -> Life:
    """What happened in one attempt. The record does not tell start from grading: each gets half of what is neither
    sampling nor tools."""
    contexts, sampled = _sampled(trajectory)
    ends = [context + tokens for context, tokens in zip(contexts, sampled, strict=True)]
    # Where the history was shortened, a context is shorter than what was there before it.
    between = [max(0, context - end) for context, end in zip(contexts[1:], ends, strict=False)]
    turns = tuple(
        Turn(
            sampled[place] if place < len(sampled) else 1,
            step.environment_s,
            between[place] if place < len(between) else 0,
        )
        for place, step in enumerate(trajectory.steps)
    )
    rest = trajectory.wall_s - sum(step.generation_s + step.environment_s for step in trajectory.steps)
    prompt = contexts[0] if contexts else trajectory.length
    return Life(prompt, turns, max(rest, 0.0) / 2, max(rest, 0.0) / 2, trajectory.reward or 0.0)


def _sampled(trajectory: Trajectory) -> tuple[list[int], list[int]]:
    """Of each turn, the tokens before it and the tokens that were sampled, by however many versions."""
    contexts, sampled = list[int](), list[int]()
    for spans in trajectory.sequences:
        length = 0
        for by_policy, run in groupby(spans, key=lambda span: span.sampled):
            tokens = sum(len(span.tokens) for span in run)
            if by_policy:
                contexts.append(length)
                sampled.append(tokens)
            length += tokens
    return contexts, sampled
