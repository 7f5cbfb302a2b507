"""What one evaluation says, as plain values: scores, spread, groups, what it used and how attempts ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from deepswe.evaluation.metrics import (
    TASKS_A_GROUP,
    Outcomes,
    count_endings,
    count_grades,
    group_by,
    mean_pass_at_k,
    outcomes_by_task,
    pass_at_1,
)
from deepswe.rollout.canaries import count_canaries
from deepswe.types import Trajectory

GROUPS = ("repo", "difficulty")
"""Tags by which a table splits the tasks."""
KS = (1, 2, 4, 8, 16, 32, 64)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Used:
    """What an attempt used.

    Attributes:
        steps: turns.
        sampled: tokens of the policy.
        context: tokens of the conversation at its end.
        read: tokens that a remote endpoint read, over all requests; 0 for an engine of ours.
        cached: of these, the ones out of its cache.
        dollars: what the endpoint cost.
        estimated: turns whose counts are our own.
    """

    steps: int
    sampled: int
    context: int
    read: int
    cached: int
    dollars: float
    estimated: int


@dataclass(frozen=True, slots=True)
class OverRuns:
    """pass@1 of each run over the tasks, where run i is attempt i at each of them.

    Attributes:
        mean: over runs.
        standard_error: of that mean, from the spread between runs alone; None with one run. It says how much the
            score moves when the same tasks are attempted again, not how it moves with other tasks.
        runs: how many.
    """

    mean: float
    standard_error: float | None
    runs: int


def used_by(trajectory: Trajectory) -> Used:
    """What one attempt used, by the endpoint's counts where there was one."""
    usage = trajectory.usage
    return Used(
        steps=len(trajectory.steps),
        sampled=trajectory.sampled_length,
        context=trajectory.length,
        read=sum(turn.prompt for turn in usage),
        cached=sum(turn.cached for turn in usage),
        dollars=math.fsum(turn.dollars for turn in usage),
        estimated=sum(turn.estimated for turn in usage),
    )


def over_runs(trajectories: Iterable[Trajectory]) -> OverRuns:
    """Mean and standard error of pass@1 over runs; an attempt without a verdict is in no run.

    Raises:
        ValueError: no attempt has a verdict.
    """
    runs: dict[int, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            runs.setdefault(trajectory.attempt, []).append(float(trajectory.reward >= 1.0))
    if not runs:
        raise ValueError("pass@1 over runs: no attempt has a verdict")
    scores = [fmean(run) for run in runs.values()]
    error = stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return OverRuns(fmean(scores), error, len(scores))


def summarise(trajectories: Sequence[Trajectory], *, planned: int) -> Row:
    """The final table of an evaluation. Nothing in it depends on the order or the speed of the attempts.

    Args:
        trajectories: one a (task, attempt).
        planned: attempts that were to be made.

    Returns:
        pass_at_1 {mean, standard_error, runs, low, high, tasks, attempts}: the interval is clustered by task;
        pass_at_k {k: unbiased mean}; by {"repo", "difficulty": rows}; used {totals, and means an attempt}; endings,
        grades, canaries; attempts {planned, made, graded}. The scores are missing where no attempt has a verdict.
    """
    held = sorted(trajectories, key=lambda trajectory: trajectory.key)
    outcomes = outcomes_by_task(held)
    graded = sum(map(len, outcomes.values()))
    row: Row = {"attempts": {"planned": planned, "made": len(held), "graded": graded}}
    if graded:
        row |= {"pass_at_1": _score(held, outcomes), "pass_at_k": _at_k(outcomes)}
        row["by"] = {name: rows for name in GROUPS if (rows := _by(held, name))}
    return row | {
        "used": _used(held),
        "endings": count_endings(held),
        "grades": count_grades(held),
        "canaries": count_canaries(held),
    }


def _score(held: Sequence[Trajectory], outcomes: Outcomes) -> Row:
    estimate, runs = pass_at_1(outcomes), over_runs(held)
    return {
        "mean": estimate.mean,
        "low": estimate.low,
        "high": estimate.high,
        "mean_of_runs": runs.mean,
        "standard_error": runs.standard_error,
        "runs": runs.runs,
        "tasks": estimate.tasks,
        "attempts": estimate.attempts,
    }


def _at_k(outcomes: Outcomes) -> dict[str, float]:
    most = max(map(len, outcomes.values()))
    return {str(k): mean_pass_at_k(outcomes, k) for k in sorted({*KS, most}) if k <= most}


def _by(held: Sequence[Trajectory], tag: str) -> list[Row]:
    """Rows by a tag; none where no task has it, where all have the same value, or where a value has hardly a second
    task."""
    groups = group_by(held, lambda trajectory: trajectory.tags.get(tag, ""))
    tasks = len({trajectory.task_id for trajectory in held})
    if not 1 < len(groups) <= tasks // TASKS_A_GROUP:
        return []
    rows = []
    for name, members in groups.items():
        outcomes = outcomes_by_task(members)
        scored = any(outcomes.values())
        estimate = pass_at_1(outcomes) if scored else None
        rows.append(
            {
                "name": name or "(none)",
                "tasks": len(outcomes),
                "attempts": len(members),
                "mean": estimate.mean if estimate else None,
                "low": estimate.low if estimate else None,
                "high": estimate.high if estimate else None,
            }
        )
    return rows


def _used(held: Sequence[Trajectory]) -> Row:
    spent = [used_by(trajectory) for trajectory in held]
    count = max(len(spent), 1)
    names = ("steps", "sampled", "context", "read", "cached", "dollars", "estimated")
    totals = {name: math.fsum(getattr(used, name) for used in spent) for name in names}
    whole = {name: value if name == "dollars" else int(value) for name, value in totals.items()}
    return {**whole, "mean": {name: totals[name] / count for name in ("steps", "sampled", "context", "dollars")}}
