"""The loop ends in every way of law 2, keeps the stream exact, and always releases what it took."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from deepswe.config import AgentConfig, RolloutConfig
from deepswe.errors import PolicyError
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.scripted import ByteRenderer, ScriptedPolicy
from deepswe.rollout.agent import run_attempt, strip_thinking
from deepswe.rollout.attempt import Attempt
from deepswe.rollout.record import dump_trajectory, load_trajectory
from deepswe.types import Ending, Graded, Message, Trajectory, Ungraded
from tests.unit.rollout.guessing import Guessing, Number

ATTEMPT = Attempt("n", 0, "train", 0, seed=1, temperature=1.0)


class Watched(ScriptedPolicy):
    """A scripted policy that remembers the streams it was given and the names it was told to release."""

    def __init__(self, turns: Sequence[str], *, finish: str = "", delay_s: float = 0.0) -> None:
        super().__init__(ByteRenderer(), lambda name: iter(turns))
        self.streams: list[tuple[int, ...]] = []
        self.released: list[str] = []
        self._finish, self._delay_s = finish, delay_s

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        self.streams.append(tuple(stream))
        await asyncio.sleep(self._delay_s)
        if self._finish == "timeout":
            return Completion((1, 2), (0.0, 0.0), "timeout", 0)
        return await super().generate(trajectory, stream, sampling, timeout_s=timeout_s)

    async def release(self, trajectory: str) -> None:
        self.released.append(trajectory)
        await super().release(trajectory)


def attempt(env: Guessing, policy: ScriptedPolicy, **limits: Any) -> Trajectory:
    return asyncio.run(
        run_attempt(env, policy, ByteRenderer(), ATTEMPT, rollout=RolloutConfig(**limits), agent=AgentConfig())
    )


def test_a_submission_is_graded_and_its_stream_is_what_the_engine_saw() -> None:
    env, policy = Guessing(Number("n")), Watched(["3", "7"])
    trajectory = attempt(env, policy)
    assert trajectory.ending is Ending.SUBMITTED
    assert trajectory.grade == Graded(1.0)
    assert trajectory.artifact == "patch"
    stream = [token for span in trajectory.spans for token in span.tokens]
    assert tuple(stream[: len(policy.streams[1])]) == policy.streams[1]
    assert [span.sampled for span in trajectory.spans] == [False, True, False, True]
    sampled = [ByteRenderer().decode(span.tokens) for span in trajectory.spans if span.sampled]
    assert sampled == ["3", "7"]
    assert [step.observation for step in trajectory.steps] == ["too low", ""]
    assert env.log == ["start", "act 3", "act 7", "finish", "close"]
    assert policy.released == [ATTEMPT.name]


def test_the_last_allowed_turn_without_submission_is_max_steps_and_still_graded() -> None:
    trajectory = attempt(Guessing(Number("n")), Watched(["1", "2", "7"]), max_steps=2)
    assert trajectory.ending is Ending.MAX_STEPS
    assert trajectory.grade == Graded(0.0)
    assert trajectory.spans[-1].sampled


def test_a_turn_cut_by_the_context_is_max_context_and_not_carried_out() -> None:
    env = Guessing(Number("n"))
    trajectory = attempt(env, Watched(["x" * 100]), max_tokens=40, max_turn_tokens=40)
    assert trajectory.ending is Ending.MAX_CONTEXT
    assert trajectory.length == 40
    assert env.log == ["start", "finish", "close"]


def test_a_turn_cut_by_its_own_limit_is_carried_out_and_closed_by_an_unsampled_token() -> None:
    env = Guessing(Number("n"))
    trajectory = attempt(env, Watched(["xxxxxxxx", "7"]), max_turn_tokens=4)
    assert env.log[1] == "act xxxx"
    assert trajectory.ending is Ending.SUBMITTED
    closing = trajectory.spans[2]
    assert not closing.sampled
    assert closing.tokens[0] in ByteRenderer.stop_tokens


def test_an_observation_that_does_not_fit_is_max_context() -> None:
    trajectory = attempt(Guessing(Number("n")), Watched(["1", "7"]), max_tokens=15, max_turn_tokens=15)
    assert trajectory.ending is Ending.MAX_CONTEXT
    assert trajectory.length <= 15


def test_a_late_engine_is_generation_timeout_and_its_tokens_are_kept() -> None:
    trajectory = attempt(Guessing(Number("n")), Watched([], finish="timeout"))
    assert trajectory.ending is Ending.GENERATION_TIMEOUT
    assert trajectory.spans[-1].tokens == (1, 2)
    assert isinstance(trajectory.grade, Graded)


def test_a_slow_environment_is_env_timeout() -> None:
    env = Guessing(Number("n"), slow_s=0.1)
    trajectory = attempt(env, Watched(["1"] * 50), trajectory_timeout_s=0.25)
    assert trajectory.ending is Ending.ENV_TIMEOUT
    assert env.log[-1] == "close"


@pytest.mark.parametrize(
    ("fail_in", "place"),
    [
        ("start", "environment.start"),
        ("act", "environment.act"),
        ("finish", "environment.finish"),
        ("bug in act", "environment.act"),
        ("grading", "grading"),
    ],
)
def test_a_failure_is_an_error_without_a_reward_and_names_its_place(fail_in: str, place: str) -> None:
    env, policy = Guessing(Number("n"), fail_in=fail_in), Watched(["7"])
    trajectory = attempt(env, policy)
    assert trajectory.ending is Ending.ERROR
    assert isinstance(trajectory.grade, Ungraded)
    assert trajectory.grade.place == place
    assert trajectory.reward is None
    assert env.log[-1] == "close"


def test_a_broken_engine_is_an_error_of_the_policy() -> None:
    def script(name: str) -> Iterator[str]:
        raise PolicyError("no engine")

    trajectory = attempt(Guessing(Number("n")), ScriptedPolicy(ByteRenderer(), script))
    assert trajectory.ending is Ending.ERROR
    assert isinstance(trajectory.grade, Ungraded)
    assert "no engine" in trajectory.error


def test_a_cancelled_attempt_closes_its_environment_and_releases_the_engine() -> None:
    env, policy = Guessing(Number("n"), slow_s=60.0), Watched(["1", "7"])

    async def main() -> None:
        task = asyncio.create_task(
            run_attempt(env, policy, ByteRenderer(), ATTEMPT, rollout=RolloutConfig(), agent=AgentConfig())
        )
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert env.log == ["start", "act 1", "close"]
    assert policy.released == [ATTEMPT.name]


class Stuck(Guessing):
    """Never closes by itself."""

    async def close(self) -> None:
        await super().close()
        await asyncio.sleep(60)


def test_an_environment_that_does_not_close_holds_up_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepswe.rollout.agent.GRACE_S", 0.05)
    trajectory = attempt(Stuck(Number("n")), Watched(["7"]))
    assert trajectory.grade == Graded(1.0)


def test_an_engine_that_does_not_release_ends_the_attempt_as_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holding(Watched):
        async def release(self, trajectory: str) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr("deepswe.rollout.agent.GRACE_S", 0.05)
    trajectory = attempt(Guessing(Number("n")), Holding(["7"]))
    assert trajectory.ending is Ending.ERROR
    assert isinstance(trajectory.grade, Ungraded)
    assert trajectory.grade.place == "policy.release"


def test_steps_remaining_is_said_where_the_recipe_asks_for_it() -> None:
    trajectory = asyncio.run(
        run_attempt(
            Guessing(Number("n")),
            Watched(["1", "7"]),
            ByteRenderer(),
            ATTEMPT,
            rollout=RolloutConfig(max_steps=5),
            agent=AgentConfig(steps_remaining=True),
        )
    )
    assert trajectory.steps[0].observation == "too low\nSteps Remaining: 4"


class Lines(ScriptedPolicy):
    """Says its lines whatever the stream is; a scripted policy starts anew where the stream gets shorter."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(ByteRenderer(), lambda name: iter(()))
        self._lines = iter(lines)

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        tokens = ByteRenderer().completion(next(self._lines))
        return Completion(tokens, (0.0,) * len(tokens), "stop", 0)


def test_stripped_thinking_begins_a_sequence_with_the_exact_context_of_each_later_turn() -> None:
    turns = ["<think>a</think>\n1", "2", "<think>b</think>3", "7"]
    renderer = ByteRenderer()
    env = Guessing(Number("t"))
    trajectory = asyncio.run(
        run_attempt(
            env,
            Lines(turns),
            renderer,
            Attempt("t", 0, "train", 0, seed=1, temperature=1.0),
            rollout=RolloutConfig(),
            agent=AgentConfig(history="strip_thinking"),
        )
    )
    opening, observed = renderer.opening([Message("user", "guess")]), renderer.observation("too low")
    seen = [renderer.completion(text) for text in ("1", "2", "3")]
    contexts = [spans[0].tokens for spans in trajectory.sequences]
    assert contexts == [
        opening,
        (*opening, *seen[0], *observed),
        (*opening, *seen[0], *observed, *seen[1], *observed, *seen[2], *observed),
    ]
    assert [[span.sampled for span in spans] for spans in trajectory.sequences] == [
        [False, True],
        [False, True, False, True],
        [False, True],
    ]
    assert [step.completion for step in trajectory.steps] == turns
    assert trajectory.ending is Ending.SUBMITTED
    assert load_trajectory(dump_trajectory(trajectory)) == trajectory


def test_kept_thinking_is_one_growing_sequence() -> None:
    assert strip_thinking("<think>a\nb</think>\n\ncall <think>open") == "call <think>open"
    renderer = ByteRenderer()
    trajectory = asyncio.run(
        run_attempt(
            Guessing(Number("t")),
            ScriptedPolicy(renderer, lambda name: iter(["<think>a</think>1", "7"])),
            renderer,
            Attempt("t", 0, "train", 0, seed=1, temperature=1.0),
            rollout=RolloutConfig(),
            agent=AgentConfig(),
        )
    )
    assert trajectory.starts == ()
    assert len(trajectory.sequences) == 1
