"""What a recorded run says of itself, so that a simulation can go like it: its attempts, and its own speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepswe.analysis.record import Row, number, read_run
from deepswe.config import build_section
from deepswe.errors import ConfigError
from deepswe.rollout.store import TrajectoryStore
from deepswe.simulate.profile import Lives, Profile, RecordedLives
from deepswe.types import Ending, Trajectory

FASTEST = 1e9
"""Tokens a second of what costs no time of its own."""
GRAINS = 8
"""Units of an average turn, at least, that a simulation of a recorded run counts."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run as a simulation takes it.

    Attributes:
        lives: of its attempts of training.
        profile: speeds.
        text: on one line, what is taken from the record and what is assumed.
    """

    lives: Lives
    profile: Profile
    text: str


def read_recorded(run: Path, profile: Profile | None = None) -> Recorded:
    """Take from a run directory what it tells.

    Args:
        run: a run directory.
        profile: speeds of other machines; None takes the run's own where the record has them.

    Raises:
        ConfigError: it has no attempt of training with a turn.
        RunError: a file in it is damaged.
    """
    if not (run / "trajectories").is_dir():
        raise ConfigError(f"{run} holds no trajectories; give the directory of a run")
    attempts = tuple(TrajectoryStore(run).read("train"))
    lives = RecordedLives(attempts)
    ran = [t for t in attempts if t.steps and t.ending is not Ending.ERROR]
    record = read_run(run)
    speeds = _Speeds.of(ran, record.of_kind("train"), record.recipe) if profile is None else None
    changes = {"unit": _unit(ran), **(speeds.changes() if speeds else {})}
    tree = {**(profile or Profile()).model_dump(), **changes}
    taken = f"from {run}: {len(ran)} attempts (prompts, turns, observations, seconds of tools)"
    split = "start and grading share the rest of an attempt's time"
    if speeds:
        text = f"{taken}, {speeds.text()}; assumed: {split}, more attempts at once are sampled no faster in all"
    else:
        text = f"{taken}; assumed: {split}, speeds are those of {'the profile' if profile else '64 H100 and 32B'}"
    return Recorded(lives, build_section(Profile, tree, origin=f"the record of {run}"), text)


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Of a run on its own machine.

    Attributes:
        request: tokens a second of one request, what it waits and reads included.
        engine: of all requests that were sampled at once.
        learner: tokens of all attempts of a step, trained or not, a second of the learner.
        learner_s, publish_s: seconds a step of the learner, and of what is neither rollout nor learner.
        apart: the engine samples while the learner trains.
    """

    request: float
    engine: float
    learner: float
    learner_s: float
    publish_s: float
    apart: bool

    @classmethod
    def of(cls, attempts: Sequence[Trajectory], rows: Sequence[Row], recipe: Mapping[str, Any]) -> _Speeds | None:
        """None where the record does not have all of them."""
        generation_s = sum(step.generation_s for t in attempts for step in t.steps)
        wall_s, sampled = sum(t.wall_s for t in attempts), sum(t.sampled_length for t in attempts)
        learner_s, seconds, rollout_s = (
            sum(number(row, key) or 0.0 for row in rows) for key in ("learner_s", "seconds", "rollout_s")
        )
        tokens = sum((number(row, "length_mean") or 0.0) * _attempts(row) for row in rows)
        if not (recipe and sampled and generation_s and wall_s and tokens and learner_s):
            return None
        # As many attempts as there were at once, each for the share of its time in which it is sampled.
        at_once = max(1.0, _in_flight(recipe) * generation_s / wall_s)
        return cls(
            request=sampled / generation_s,
            engine=at_once * sampled / generation_s,
            learner=tokens / learner_s,
            learner_s=learner_s / len(rows),
            publish_s=max(0.0, seconds - rollout_s - learner_s) / len(rows),
            apart=recipe["engine"]["backend"] == "vllm",
        )

    def changes(self) -> dict[str, float]:
        """Fields of a profile in which the run's machine is one GPU, or one that samples and one that trains."""
        return {
            "gpus": 2 if self.apart else 1,
            "learner_gpus": 1 if self.apart else 0,
            "decode_tokens_per_s": self.engine,
            "request_tokens_per_s": self.request,
            "prefill_tokens_per_s": FASTEST,
            "train_tokens_per_s": min(self.learner, FASTEST),
            "train_fixed_s": 0.0,
            "publish_s": self.publish_s,
        }

    def text(self) -> str:
        """What it says, for people."""
        return (
            f"sampling ({self.request:,.3g} tokens/s a request, {self.engine:,.0f} in all), learner "
            f"({self.learner_s:.3g} s a step), change of weights ({self.publish_s:.2g} s)"
        )


def _attempts(row: Row) -> float:
    """Attempts of the step of this row."""
    return sum(number(row, f"ending/{ending}") or 0.0 for ending in Ending)


def _in_flight(recipe: Mapping[str, Any]) -> int:
    """Attempts that a run has in flight, as far as its recipe says; `simulate.run` takes the same."""
    rollout = recipe["rollout"]
    attempts = int(rollout["concurrency"] or rollout["tasks_per_step"] * rollout["group_size"])
    return min(attempts, int(recipe["sandbox"]["concurrency"] or attempts))


def _unit(attempts: Sequence[Trajectory]) -> int:
    """Tokens that count as one: few enough that turns keep their lengths."""
    turns = sum(len(t.steps) for t in attempts)
    return max(1, min(32, sum(t.sampled_length for t in attempts) // turns // GRAINS))
