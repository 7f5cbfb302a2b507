"""Evaluation: attempts at held-out tasks, recorded like all others, and their pass@1 with intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepswe.config import EvaluationConfig
from deepswe.envs.base import Suite
from deepswe.errors import ConfigError
from deepswe.evaluation.metrics import (
    Difference,
    Estimate,
    count_endings,
    count_grades,
    outcomes_by_task,
    paired_difference,
    pass_at_1,
)
from deepswe.rollout.scheduler import Batch, Scheduler, collect_recorded
from deepswe.rollout.store import TrajectoryStore
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
    for split in config.splits:
        tasks = tuple(suite.split(split))
        if not tasks:
            raise ConfigError(f"evaluation.splits names {split!r}, of which this task set has no tasks")
        chosen = tasks[: config.tasks] if config.tasks else tasks
        phase = evaluation_phase(name, split)
        batches.append((split, Batch(phase, step, chosen, config.attempts, config.temperature)))
    return tuple(batches)


async def evaluate_batch(
    scheduler: Scheduler,
    store: TrajectoryStore,
    batch: Batch,
    *,
    keep: bool,
    on_done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Row:
    """Make (or read back) one batch and sum it up as a row of metrics."""
    started = time.monotonic()
    trajectories = await collect_recorded(scheduler, store, batch, keep=keep, on_done=on_done)
    return evaluation_row(trajectories) | {"seconds": time.monotonic() - started}


def evaluation_row(trajectories: Iterable[Trajectory]) -> Row:
    """pass@1 with its interval, and the counts by ending and by grade.

    Raises:
        ValueError: no attempt has a verdict.
    """
    held = tuple(trajectories)
    estimate: Estimate = pass_at_1(outcomes_by_task(held))
    return {
        "pass_at_1": estimate.mean,
        "low": estimate.low,
        "high": estimate.high,
        "tasks": estimate.tasks,
        "attempts": estimate.attempts,
        "endings": count_endings(held),
        "grades": count_grades(held),
        "length_mean": sum(t.length for t in held) / len(held),
        "steps_mean": sum(len(t.steps) for t in held) / len(held),
    }


def compare_phases(store: TrajectoryStore, before: str, after: str) -> Difference:
    """The paired difference of two evaluations of the same tasks.

    Raises:
        ValueError: they have no task with a verdict in common.
    """
    return paired_difference(outcomes_by_task(store.read(before)), outcomes_by_task(store.read(after)))


def sum_counts(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts added key by key."""
    total: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            total[key] = total.get(key, 0) + value
    return total
