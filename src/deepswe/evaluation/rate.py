"""Pass rates of tasks out of the trajectories of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from deepswe.errors import RunError
from deepswe.rollout.store import TrajectoryStore
from deepswe.tasks.difficulty import Rates, count_attempts

SCRIPTED = ("imitation", "reference", "noop")
"""Beginnings of phases in which no model acts."""


def rates_of_runs(runs: Sequence[Path], *, phase: str = "") -> Rates:
    """Attempts and solved ones by task, over committed trajectories in which a model acted.

    Args:
        runs: run directories, finished or going on.
        phase: only phases that begin so, such as "train" or "after"; empty takes all.

    Raises:
        RunError: a directory is no run.
        StoreError: a record cannot be read.
    """

    def outcomes() -> Iterator[tuple[str, float | None]]:
        for run in runs:
            store = TrajectoryStore(run)
            if not store.directory.is_dir():
                raise RunError(f"{run} is no run directory: it has no trajectories; name a directory such as runs/NAME")
            for name in dict.fromkeys(name for name, _ in store.segments()):
                if name.startswith(phase) and not name.startswith(SCRIPTED):
                    yield from ((trajectory.task_id, trajectory.reward) for trajectory in store.read(name))

    return count_attempts(outcomes())
