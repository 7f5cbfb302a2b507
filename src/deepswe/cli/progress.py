"""Progress on the terminal, with rich: one bar for the stage at hand, and lines that stay."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from deepswe.analysis.harmless import harmless

EVERY_S = 30.0
"""Without a terminal, a stage that takes longer than this says how far it is, about so often."""


class TerminalProgress:
    """A context; a `deepswe.progress.Progress` while it is entered. Without a terminal, such as where the output goes
    to a file, a line now and then stands for the bar."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._said = 0.0
        self._bars = Bars(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def begin(self, stage: str, total: int) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(harmless(stage), total=total, note="")
        self._said = time.monotonic()

    def advance(self, pieces: int = 1, note: str = "") -> None:
        """See `Progress`."""
        if self._task is not None:
            if note:
                self._bars.update(self._task, advance=pieces, note=harmless(note))
            else:
                self._bars.update(self._task, advance=pieces)
            if not self._console.is_terminal and time.monotonic() - self._said >= EVERY_S:
                self._say_how_far(self._task)

    def _say_how_far(self, task: TaskID) -> None:
        self._said = time.monotonic()
        stage = next(one for one in self._bars.tasks if one.id == task)
        note = f", {stage.fields['note']}" if stage.fields["note"] else ""
        self.say(f"{stage.description}: {stage.completed:g} of {stage.total or 0:g}{note}")

    def say(self, text: str) -> None:
        """See `Progress`."""
        self._console.print(harmless(text), highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
