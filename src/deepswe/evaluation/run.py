"""Evaluation: attempts at held-out tasks, recorded like all others, and their pass@1 with intervals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepswe.config import EvaluationConfig
from deepswe.envs.base import Suite
from deepswe.envs.splits import check_evaluated
from deepswe.evaluation.metrics import count_endings, count_grades, outcomes_by_task, pass_at_1
from deepswe.rollout.canaries import count_canaries
from deepswe.rollout.scheduler import Batch
from deepswe.types import Trajectory

Row = dict[str, Any]


def evaluation_phase(name: str, split: str) -> str:
    """Under which phase the store keeps an evaluation."""
    return f"{name}_{split}"


def evaluation_batches(
    suite: Suite, config: EvaluationConfig, *, name: str, step: int
) -> tuple[tuple[str, Batch], ...]:
    """(split, batch) for each split of the recipe.

    Args:
        name: "before", "step" or "after".
        step: training steps so far.

    Raises:
        ConfigError: a split has no tasks.
    """
    batches = []
    check_evaluated(suite, config.splits)
    for split in config.splits:
        tasks = tuple(suite.split(split))
        chosen = tasks[: config.tasks] if config.tasks else tasks
        phase = evaluation_phase(name, split)
        batches.append((split, Batch(phase, step, chosen, config.attempts, config.temperature)))
    return tuple(batches)


def evaluation_row(trajectories: Iterable[Trajectory]) -> Row:
    """pass@1 with its interval, and the counts by ending, by grade and by sign of cheating.

    Raises:
        ValueError: no attempt has a verdict.
    """
    held = tuple(trajectories)
    estimate = pass_at_1(outcomes_by_task(held))
    return {
        "pass_at_1": estimate.mean,
        "low": estimate.low,
        "high": estimate.high,
        "tasks": estimate.tasks,
        "attempts": estimate.attempts,
        "endings": count_endings(held),
        "grades": count_grades(held),
        "canaries": count_canaries(held),
        "length_mean": sum(t.length for t in held) / len(held),
        "steps_mean": sum(len(t.steps) for t in held) / len(held),
    }


def version_range(trajectories: Iterable[Trajectory]) -> Row:
    """The oldest and the newest version of the weights that sampled in these attempts: version_low, version_high."""
    versions = [span.version for t in trajectories for span in t.spans if span.sampled]
    return {"version_low": min(versions, default=0), "version_high": max(versions, default=0)}
