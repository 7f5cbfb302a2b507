"""The execution-free verifier on a causal LM in this process: how it is asked, and how sure it is.

The answer is one token: the first in which the model's tokens of the two answers differ. Where that is, is found by
comparing them, and its probability is P(YES) / (P(YES) + P(NO)) at that place, whatever else the model would say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from deepswe.algorithms.packing import TrainingSample, collate, make_samples, split_by_tokens
from deepswe.errors import ConfigError
from deepswe.own_thread import OwnThread
from deepswe.policy.base import Renderer
from deepswe.scaling.calibration import with_prior
from deepswe.scaling.verifier_data import Example, as_trajectory
from deepswe.scaling.verifier_prompt import ANSWERS, Reading, Style, condense, messages_of, read_candidate
from deepswe.training.forward import TokenScorer
from deepswe.types import Message, Trajectory

TRIES = 4
"""Times that a prompt is cut anew where marks and frames made it longer than the budget."""


class Judge(Protocol):
    """Whoever gives probabilities."""

    async def judge(self, readings: Sequence[Reading]) -> list[float | None]:
        """That each is right; None where there was no answer."""
        ...


class RendererTokens:
    """The tokens of a renderer's model."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._end = len(renderer.completion(""))

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, no special token read out of it."""
        tokens = self._renderer.completion(text)
        return tokens[: len(tokens) - self._end]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self._renderer.decode(tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """Where and how a model says yes or no.

    Attributes:
        before: tokens of both answers before they differ, part of the prompt.
        yes, no: the first token in which they differ.
    """

    before: tuple[int, ...]
    yes: int
    no: int

    @classmethod
    def of(cls, renderer: Renderer) -> Answer:
        """Search for the place.

        Raises:
            ConfigError: the answers do not differ in a token before the end of their turn.
        """
        yes, no = (renderer.completion(word) for word in ANSWERS)
        place = next((i for i, pair in enumerate(zip(yes, no, strict=False)) if pair[0] != pair[1]), None)
        if place is None or {yes[place], no[place]} & renderer.stop_tokens:
            raise ConfigError(
                f"the tokenizer gives {ANSWERS[0]} the tokens {yes} and {ANSWERS[1]} {no}, which do not differ; "
                "use a model with another tokenizer"
            )
        return cls(yes[:place], yes[place], no[place])


class Prompter:
    """Candidates as the tokens that ask about them."""

    def __init__(self, renderer: Renderer, *, style: Style, budget: int) -> None:
        """Args:
        renderer: of the model's chat template.
        style: see `messages_of`.
        budget: tokens of a whole prompt.

        Raises:
            ConfigError: the budget has no room for the frame, or the answers cannot be told apart.
        """
        self.answer = Answer.of(renderer)
        self._renderer, self._tokens, self._style, self._budget = renderer, RendererTokens(renderer), style, budget
        frame = len(self._render(Reading("", (Message("assistant", ""), Message("user", "")), "")))
        if budget < 2 * frame:
            raise ConfigError(
                f"prompt.budget is {budget} tokens, of which the frame alone takes {frame}; allow {2 * frame} or more"
            )
        self._room = budget - frame

    def prompt(self, reading: Reading) -> tuple[int, ...] | None:
        """The tokens up to the answer, at most the budget; None where it cannot be cut to that."""
        room, rendered = self._room, self._render(reading)
        for _ in range(TRIES):
            if len(rendered) <= self._budget:
                return rendered
            rendered = self._render(condense(reading, self._tokens, room))
            room -= max(0, len(rendered) - self._budget)
        return rendered if len(rendered) <= self._budget else None

    def _render(self, reading: Reading) -> tuple[int, ...]:
        return self._renderer.opening(messages_of(reading, self._style)) + self.answer.before

    def lessons(self, examples: Sequence[Example]) -> list[Trajectory]:
        """What the learner takes; an example that does not fit the budget is left out."""
        token = {True: self.answer.yes, False: self.answer.no}
        lessons = []
        for example in examples:
            prompt = self.prompt(read_candidate(example.candidate))
            if prompt is not None:
                lessons.append(as_trajectory(example.candidate.task_id, prompt, token[example.answer]))
        return lessons


class ModelJudge:
    """A verifier in this process. See `Judge`."""

    def __init__(
        self,
        model: nn.Module,
        prompter: Prompter,
        *,
        prior: float = 0.5,
        tokens_per_microbatch: int = 8192,
        bfloat16: bool = False,
    ) -> None:
        """Args:
        model: a causal LM; put into eval mode.
        prompter: asks.
        prior: share of right candidates in the pool that it learnt from, before they were balanced.
        tokens_per_microbatch: in one forward pass.
        bfloat16: forward pass under autocast.
        """
        self._prompter, self._prior, self._budget = prompter, prior, tokens_per_microbatch
        self._device = next(model.parameters()).device
        self._scorer = TokenScorer(model.eval(), bfloat16=bfloat16)
        self._thread = OwnThread("judge")

    async def judge(self, readings: Sequence[Reading]) -> list[float | None]:
        """That each is right; None where its prompt does not fit the budget or the model gives no number."""
        return await self._thread(self.judge_now, readings)

    @torch.no_grad()
    def judge_now(self, readings: Sequence[Reading]) -> list[float | None]:
        """As `judge`, in the calling thread."""
        prompts = [self._prompter.prompt(reading) for reading in readings]
        asked = [index for index, prompt in enumerate(prompts) if prompt is not None]
        pairs = [self._pair(prompt) for prompt in prompts if prompt is not None]
        found: list[float | None] = [None] * len(readings)
        for batch in split_by_tokens([2 * yes.length for yes, _ in pairs], self._budget):
            scored = collate([sample for place in batch for sample in pairs[place]]).to(self._device)
            logp_N = self._scorer(scored).logp_N.tolist()
            for row, place in enumerate(batch):
                found[asked[place]] = self._probability(logp_N[2 * row], logp_N[2 * row + 1])
        return found

    def _pair(self, prompt: Sequence[int]) -> tuple[TrainingSample, TrainingSample]:
        """The prompt with each of the two answers."""
        answer = self._prompter.answer
        yes, no = (make_samples(as_trajectory("", prompt, token))[0] for token in (answer.yes, answer.no))
        return yes, no

    def _probability(self, yes: float, no: float) -> float | None:
        if not (math.isfinite(yes) and math.isfinite(no)):
            return None
        return with_prior(1.0 / (1.0 + math.exp(min(no - yes, 700.0))), self._prior)
