"""A run as it stands now, read from the files that another process is writing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepswe.analysis.record import Row, RunRecord, number, read_run
from deepswe.errors import RunError
from deepswe.rollout.frames import count_frames
from deepswe.rollout.store import PARTIAL

MARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a run at one moment.

    Attributes:
        name: of the run.
        status: "running", "finished", or "stopped": no summary and no process that owns it.
        step, steps: training steps taken and wanted; `steps` is 0 where the recipe has none.
        imitation: updates of the warm-up taken.
        batch: the batch in flight, such as "train step 13", or "".
        done, wanted: attempts of it that are finished, and all; `wanted` is 0 where it is not known.
        train: the newest train row, or empty.
        rewards: mean reward of every step so far.
        evaluations: the newest row of each evaluation.
        warnings: names of what the newest train row finds unhealthy.
    """

    name: str
    status: str
    step: int
    steps: int
    imitation: int
    batch: str
    done: int
    wanted: int
    train: Row
    rewards: tuple[float, ...]
    evaluations: tuple[Row, ...]
    warnings: tuple[str, ...]


@dataclass(slots=True)
class Watcher:
    """Reads a run again and again; of segments in flight only what was added."""

    directory: Path
    _counted: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def look(self) -> State:
        """The state now.

        Raises:
            RunError: there is no such run, or a record is damaged.
        """
        run = read_run(self.directory)
        if not run.recipe and not (self.directory / "trajectories").is_dir():
            raise RunError(f"{self.directory} holds no run; give the directory of a run, such as runs/quickstart")
        train = run.of_kind("train")
        newest: Row = train[-1] if train else {}
        partial = self._partial()
        warnings = newest.get("warnings")
        return State(
            name=run.name,
            status="finished" if run.summary else "running" if _owner_lives(self.directory / "lock") else "stopped",
            step=int(newest.get("step", 0)),
            steps=_whole(run.recipe, "training", "steps"),
            imitation=max((int(row["step"]) for row in run.of_kind("imitation")), default=0),
            batch="" if partial is None else partial[0],
            done=0 if partial is None else partial[1],
            wanted=_wanted(run, partial[0]) if partial else 0,
            train=newest,
            rewards=tuple(value for row in train if (value := number(row, "reward_mean")) is not None),
            evaluations=_newest_evaluations(run),
            warnings=tuple(map(str, warnings)) if isinstance(warnings, list) else (),
        )

    def _partial(self) -> tuple[str, int] | None:
        """The segment that was written last among those in flight, and its whole records."""
        newest: tuple[float, Path] | None = None
        for path in (self.directory / "trajectories").glob(f"*{PARTIAL}"):
            try:
                found = (path.stat().st_mtime, path)
            except FileNotFoundError:  # committed just now
                continue
            newest = max(newest, found) if newest else found
        if newest is None:
            return None
        phase, _, step = newest[1].name.removesuffix(PARTIAL).rpartition("-")
        named = (
            f"{phase.replace('_', ' ')} step {int(step) + 1}" if phase.startswith("train") else phase.replace("_", " ")
        )
        return named, self._records(newest[1])

    def _records(self, path: Path) -> int:
        offset, records = self._counted.get(path, (0, 0))
        try:
            if path.stat().st_size < offset:  # begun anew
                offset, records = 0, 0
            more, offset = count_frames(path, offset)
        except FileNotFoundError:
            return records
        self._counted[path] = (offset, records + more)
        return records + more


def sparkline(values: tuple[float, ...], width: int) -> str:
    """The last `width` values as bars of text, from 0 to 1."""
    shown = values[-width:]
    return "".join(MARKS[min(len(MARKS) - 1, max(0, int(value * len(MARKS))))] for value in shown)


def _owner_lives(lock: Path) -> bool:
    try:
        owner = int(lock.read_text(encoding="ascii").strip())
        os.kill(owner, 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _newest_evaluations(run: RunRecord) -> tuple[Row, ...]:
    found: dict[tuple[str, str], Row] = {}
    for row in run.of_kind("evaluation"):
        found[(str(row.get("split", "")), str(row.get("name", "")))] = row
    return tuple(found.values())


def _wanted(run: RunRecord, batch: str) -> int:
    if not batch.startswith("train"):
        return 0
    return _whole(run.recipe, "rollout", "tasks_per_step") * _whole(run.recipe, "rollout", "group_size")


def _whole(recipe: Mapping[str, Any], section: str, key: str) -> int:
    value = recipe.get(section, {}).get(key, 0)
    return value if isinstance(value, int) else 0
