"""The agent loop: one attempt at one task, tokens in and tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepswe.config import AgentConfig, RolloutConfig
from deepswe.deadlines import within
from deepswe.envs.base import Environment, Verdict
from deepswe.errors import DeepsweError, EnvironmentFault, PolicyError, boundary
from deepswe.policy.base import Policy, Renderer, Sampling
from deepswe.rollout.attempt import Attempt, Cut
from deepswe.types import Ending, Grade, Step, TokenSpan, Trajectory, Ungraded, Usage

GRACE_S = 30.0
"""Added to a deadline that the callee keeps itself, before the loop stops waiting for it."""


REHEARSED = Verdict(Ungraded("not graded: a rehearsal", "rehearsal"))
"""The verdict on an attempt that nobody asked to grade."""


CUT = "rollout.cut"
"""The place of the grade of an attempt that was ended from outside."""

_ENDED = {
    "timeout": ("generation_timeout", Ending.GENERATION_TIMEOUT),
    "context": ("max_context", Ending.MAX_CONTEXT),
    "cost": ("max_cost", Ending.MAX_COST),
}
"""Ways in which the engine ends an attempt: finish -> the error of its last step, and the ending."""

_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


@dataclass(slots=True)
class _Record:
    """What has happened so far. Append-only.

    Attributes:
        stream: the present token sequence, as the engine sees it.
        rewritten: what a later turn is to see in its place, where thinking was stripped since the last observation.
        starts: as in `Trajectory`.
    """

    stream: list[int] = field(default_factory=list)
    rewritten: list[int] | None = None
    spans: list[TokenSpan] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)

    @property
    def history(self) -> list[int]:
        """What a later turn is to see: the stream, unless thinking was stripped."""
        return self.stream if self.rewritten is None else self.rewritten

    def append(self, spans: Sequence[TokenSpan], seen_as: tuple[int, ...] | None = None) -> None:
        """Add to the stream; later turns see `seen_as` in their place."""
        if seen_as is not None:
            self.rewritten = [*self.history, *seen_as]
        for span in spans:
            if span.tokens:
                self.stream.extend(span.tokens)
                self.spans.append(span)

    def observe(self, tokens: tuple[int, ...]) -> None:
        """Add what the environment answered; where the history is not the stream, a new sequence begins with it."""
        if self.rewritten is None or self.rewritten == self.stream:
            self.rewritten = None
            self.append((TokenSpan(tokens, sampled=False),))
            return
        self.stream, self.rewritten = [*self.rewritten, *tokens], None
        self.starts.append(len(self.spans))
        self.spans.append(TokenSpan(tuple(self.stream), sampled=False))


def strip_thinking(text: str) -> str:
    """A turn without its closed `<think>...</think>` sections and the blanks after them."""
    return _THOUGHT.sub("", text)


def was_cut(trajectory: Trajectory) -> bool:
    """Whether it was ended from outside."""
    return isinstance(trajectory.grade, Ungraded) and trajectory.grade.place == CUT


async def run_attempt(
    env: Environment,
    policy: Policy,
    renderer: Renderer,
    attempt: Attempt,
    *,
    rollout: RolloutConfig,
    agent: AgentConfig,
    graded: bool = True,
    cut: Cut | None = None,
) -> Trajectory:
    """Let the policy work on one task until it submits or a limit ends it, then grade what it reached if `graded`.

    The trajectory comes back whatever happens: a failure of the infrastructure is `Ending.ERROR` with an `Ungraded`
    grade that names the place. The environment is closed and the engine's cache released on every way out.

    Args:
        cut: called from outside, it ends the attempt where it is: `Ending.ENV_TIMEOUT` with what was recorded so far,
            and no grade.

    Raises:
        asyncio.CancelledError: the caller gave up; nothing is left behind.
    """
    record, started, cut = _Record(), _now(), cut or Cut()
    ending, error, artifact = Ending.ERROR, "", ""
    grade: Grade
    try:
        async with cut.leash():
            with boundary("environment.start", EnvironmentFault), within(rollout.start_timeout_s):
                messages = await env.start()
            record.append((TokenSpan(renderer.opening(messages), sampled=False),))
            try:
                reached = await _take_turns(env, policy, renderer, attempt, record, rollout, agent)
            finally:
                with boundary("policy.release", PolicyError), within(GRACE_S):
                    await policy.release(attempt.name)
            verdict = await _finish(env, rollout.grading_timeout_s) if graded else REHEARSED
            ending, grade, artifact = reached, verdict.grade, verdict.artifact
            if graded and isinstance(grade, Ungraded):
                ending, error = Ending.ERROR, grade.error
    except TimeoutError:  # of the leash: every other one is made an error of its place
        ending, grade = Ending.ENV_TIMEOUT, Ungraded(f"cut: {cut.reason}", CUT)
    except DeepsweError as failure:
        error = str(failure)
        grade = Ungraded(error, failure.place or "rollout")
    finally:
        # What does not close in time is cancelled; its owner, such as the pool of sandboxes, still ends what it holds.
        with contextlib.suppress(TimeoutError), within(GRACE_S):
            await env.close()
    return Trajectory(
        task_id=attempt.task_id,
        attempt=attempt.attempt,
        phase=attempt.phase,
        step=attempt.step,
        spans=tuple(record.spans),
        steps=tuple(record.steps),
        ending=ending,
        grade=grade,
        artifact=artifact,
        error=error,
        seed=attempt.seed,
        retries=attempt.retries,
        wall_s=_now() - started,
        starts=tuple(record.starts),
        usage=tuple(record.usage),
    )


async def _finish(env: Environment, timeout_s: float) -> Verdict:
    with boundary("environment.finish", EnvironmentFault), within(timeout_s):
        return await env.finish()


async def _take_turns(
    env: Environment,
    policy: Policy,
    renderer: Renderer,
    attempt: Attempt,
    record: _Record,
    rollout: RolloutConfig,
    agent: AgentConfig,
) -> Ending:
    now = asyncio.get_running_loop().time
    name, deadline = attempt.name, now() + rollout.trajectory_timeout_s
    generation_left = rollout.generation_timeout_s
    for turn in range(rollout.max_steps):
        room = rollout.max_tokens - len(record.stream)
        if room <= 0:
            return Ending.MAX_CONTEXT
        if (left := deadline - now()) <= 0:
            return Ending.ENV_TIMEOUT
        sampling = Sampling(
            max_tokens=min(room, rollout.max_turn_tokens),
            temperature=attempt.temperature,
            stop_tokens=renderer.stop_tokens,
            seed=attempt.seed * 1_000_003 + turn,
        )
        begun = now()
        limit = max(min(generation_left, left), 0.0)
        with boundary("policy.generate", PolicyError), within(limit + GRACE_S):
            completion = await policy.generate(name, record.stream, sampling, timeout_s=limit)
        generation_s = now() - begun
        generation_left -= generation_s
        text = renderer.decode(completion.tokens)
        spans = [TokenSpan(tokens, True, logprobs, version) for tokens, logprobs, version in completion.by_version()]
        stripped = strip_thinking(text) if agent.history == "strip_thinking" else text
        record.append(spans, None if stripped == text else renderer.completion(stripped))
        if completion.usage is not None:
            record.usage.append(completion.usage)
        if completion.finish in _ENDED:
            mistake, ending = _ENDED[completion.finish]
            record.steps.append(Step(text, None, "", mistake, generation_s))
            return ending
        if completion.finish == "length" and room <= rollout.max_turn_tokens:
            record.steps.append(Step(text, None, "", "max_context", generation_s))
            return Ending.MAX_CONTEXT
        begun = now()
        limit = min(agent.step_timeout_s, max(deadline - begun, 1e-3))
        with boundary("environment.act", EnvironmentFault), within(limit + GRACE_S):
            outcome = await env.act(text, timeout_s=limit)
        observation = "" if outcome.done else outcome.observation
        last = turn == rollout.max_steps - 1
        if agent.steps_remaining and not outcome.done and not last:
            observation = f"{observation}\nSteps Remaining: {rollout.max_steps - turn - 1}"
        record.steps.append(Step(text, outcome.call, observation, outcome.error, generation_s, now() - begun))
        if outcome.done:
            return Ending.SUBMITTED
        if last:
            return Ending.MAX_STEPS
        # A turn whose thinking was stripped was written anew, with its end.
        tokens = renderer.observation(observation, truncated=completion.finish != "stop" and stripped == text)
        if len(record.history) + len(tokens) >= rollout.max_tokens:
            return Ending.MAX_CONTEXT
        record.observe(tokens)
    return Ending.MAX_STEPS


def _now() -> float:
    """The event loop's clock, in seconds: the machine's, or a simulation's."""
    return asyncio.get_running_loop().time()
