"""What a run leaves for people: summary.json, curves.png and report.html, all made from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepswe.analysis.curves import write_curves
from deepswe.analysis.report import write_report
from deepswe.config import Recipe
from deepswe.evaluation.metrics import count_endings, count_grades, outcomes_by_task, paired_difference, pass_at_1
from deepswe.evaluation.run import evaluation_phase
from deepswe.rollout.canaries import count_canaries
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Trajectory

IMITATION = "imitation"
"""The phase of the reference solver's trajectories, which are not graded."""


def write_outputs(run: Path) -> Path:
    """Write the curves and the report of a run, finished or going on; returns the path of the report."""
    write_curves(run)
    return write_report(run)


def summarise(recipe: Recipe, store: TrajectoryStore, *, steps: int, wall_s: float) -> dict[str, Any]:
    """The verdict of a finished run.

    Args:
        steps: training steps taken.
        wall_s: seconds of all its processes.

    Returns:
        pass_at_1_before, pass_at_1_after, difference, ci95 [low, high] (paired by task), tasks and attempts of the
        first evaluation split; the same for each split under `splits`; endings, grades and canaries, over every
        trajectory but the reference solver's; steps; wall_s.
    """
    attempts = [t for t in store.heads() if t.phase != IMITATION]
    splits = {split: _summarise_split(recipe, attempts, split) for split in recipe.evaluation.splits}
    return {
        **splits[recipe.evaluation.splits[0]],
        "splits": splits,
        "endings": count_endings(attempts),
        "grades": count_grades(attempts),
        "canaries": count_canaries(attempts),
        "steps": steps,
        "wall_s": round(wall_s, 1),
    }


def _summarise_split(recipe: Recipe, attempts: Sequence[Trajectory], split: str) -> dict[str, Any]:
    phases = [evaluation_phase(name, split) for name in ("before", "after")]
    before, after = (outcomes_by_task(t for t in attempts if t.phase == phase) for phase in phases)
    difference = paired_difference(before, after)
    return {
        "pass_at_1_before": pass_at_1(before).mean,
        "pass_at_1_after": pass_at_1(after).mean,
        "difference": difference.mean,
        "ci95": [difference.low, difference.high],
        "tasks": difference.tasks,
        "attempts": recipe.evaluation.attempts,
    }
