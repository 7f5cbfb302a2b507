"""Rows of metrics.jsonl, also to TensorBoard, Weights & Biases or trackio. A copy to look at: no run reads it.

A writer that fails says so once and is left out from then on; the run goes on.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepswe.errors import DeepsweError, TrainingError, boundary
from deepswe.optional import optional_module
from deepswe.progress import Progress
from deepswe.training.metrics import RowTaker, read_rows

Row = Mapping[str, Any]
PROJECT = "deepswe"
_PLACES = frozenset({"kind", "step", "time_s", "split", "name"})


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a row under names such as "train/reward_mean" and "evaluation/heldout/pass_at_1"."""
    place = "/".join(str(part) for part in (row["kind"], row.get("split")) if part)
    return {
        f"{place}/{key}": float(value)
        for key, value in row.items()
        if key not in _PLACES
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


class TensorBoardWriter:
    """Event files in `run`/tensorboard. They are made anew from the rows that are there when it opens.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, run: Path) -> None:
        module = optional_module("tensorboardX", "tensorboard", "write TensorBoard events")
        directory = run / "tensorboard"
        with boundary("training.writers", TrainingError):
            shutil.rmtree(directory, ignore_errors=True)
            self._events = module.SummaryWriter(str(directory), flush_secs=10)
        for row in read_rows(run / "metrics.jsonl"):
            self.write(row)

    def write(self, row: Row) -> None:
        """See `RowTaker`."""
        with boundary("training.writers", TrainingError):
            for name, value in scalars(row).items():
                self._events.add_scalar(name, value, int(row["step"]), walltime=row.get("time_s"))

    def close(self) -> None:
        """See `RowTaker`."""
        with boundary("training.writers", TrainingError):
            self._events.close()


class TrackedWriter:
    """Weights & Biases, or trackio, which has the same calls. Each name has the step of its kind beside it.

    Args:
        module: "wandb" or "trackio", which is its extra as well.
        run: the run directory; its name is the name of the tracked run.
        config: the resolved recipe.

    Raises:
        ConfigError: it is not installed.
    """

    def __init__(self, module: str, run: Path, config: Mapping[str, Any]) -> None:
        self._module = optional_module(module, module, "track a run there")
        options = {"dir": str(run), "id": run.name, "resume": "allow"} if module == "wandb" else {"resume": "allow"}
        with boundary("training.writers", TrainingError):
            self._module.init(project=PROJECT, name=run.name, config=dict(config), **options)

    def write(self, row: Row) -> None:
        """See `RowTaker`."""
        with boundary("training.writers", TrainingError):
            self._module.log({**scalars(row), f"{row['kind']}/step": int(row["step"])})

    def close(self) -> None:
        """See `RowTaker`."""
        with boundary("training.writers", TrainingError):
            self._module.finish()


WRITERS: Mapping[str, Callable[[Path, Mapping[str, Any]], RowTaker]] = {
    "tensorboard": lambda run, config: TensorBoardWriter(run),
    "wandb": lambda run, config: TrackedWriter("wandb", run, config),
    "trackio": lambda run, config: TrackedWriter("trackio", run, config),
}
"""`run.writers` -> what makes one, of the run directory and the resolved recipe."""


class Mirror:
    """Several writers as one that never fails: one that does is closed, said, and left out.

    Args:
        writers: name -> writer.
        progress: is told.
    """

    def __init__(self, writers: Mapping[str, RowTaker], progress: Progress) -> None:
        self._writers, self._progress = dict(writers), progress

    def write(self, row: Row) -> None:
        """Give a row to all that still work."""
        self._each(lambda writer: writer.write(row))

    def close(self) -> None:
        """Close all."""
        self._each(lambda writer: writer.close())

    def _each(self, action: Callable[[RowTaker], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                action(writer)
            except DeepsweError as error:
                del self._writers[name]
                self._progress.say(f"{name} gets no more metrics: {error}")


def open_writers(names: Sequence[str], run: Path, config: Mapping[str, Any], progress: Progress) -> Mirror:
    """The writers that a recipe names.

    Raises:
        ConfigError: a library is not installed; TrainingError: a service refuses. Both before the run has begun.
    """
    return Mirror({name: WRITERS[name](run, config) for name in dict.fromkeys(names)}, progress)
