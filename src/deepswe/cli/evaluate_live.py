"""An evaluation while it goes on: one table that is drawn anew, or a line now and then where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deepswe.analysis.harmless import harmless
from deepswe.cli.evaluate_tables import plain, share
from deepswe.evaluation.metrics import count_endings, outcomes_by_task, pass_at_1
from deepswe.evaluation.summary import used_by
from deepswe.session.evaluate import Tally

EVERY_S = 0.5
LINES = 10
"""Lines of an evaluation without a terminal."""


class LiveEvaluation:
    """A context; a `deepswe.progress.Progress`, and the watcher of an evaluation, while it is entered."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._stage, self._total, self._done, self._begun, self._drawn = "", 0, 0, time.monotonic(), 0.0

    def begin(self, stage: str, total: int) -> None:
        """See `Progress`."""
        self._stage, self._total, self._done, self._begun = stage, total, 0, time.monotonic()

    def advance(self, pieces: int = 1, note: str = "") -> None:
        """See `Progress`."""
        self._done += pieces

    def say(self, text: str) -> None:
        """See `Progress`."""
        self._console.print(harmless(text), highlight=False, markup=False, soft_wrap=True)

    def watch(self, tally: Tally) -> None:
        """Draw how it stands."""
        now, terminal = time.monotonic(), self._console.is_terminal
        if terminal and now - self._drawn >= EVERY_S:
            self._drawn = now
            self._live.update(plain(self._stage, ("", ""), self._rows(tally)), refresh=True)
        elif not terminal and self._done * LINES // self._total > (self._done - 1) * LINES // self._total:
            self.say("  ".join(f"{name} {value}" for name, value in self._rows(tally)))

    def _rows(self, tally: Tally) -> list[tuple[str, str]]:
        done, new = len(tally.trajectories), len(tally.trajectories) - tally.known
        outcomes = outcomes_by_task(tally.trajectories)
        rows = [("attempts", f"{done} of {tally.planned}")]
        if any(outcomes.values()):
            estimate = pass_at_1(outcomes)
            rows.append(("pass@1", f"{share(estimate.mean)} [{share(estimate.low)}, {share(estimate.high)}]"))
        used = [used_by(trajectory) for trajectory in tally.trajectories]
        rows.append(("tokens", f"{sum(u.sampled for u in used):,}"))
        if tally.dollars:
            rows.append(("dollars", f"{tally.dollars:.4f}"))
        endings = count_endings(tally.trajectories)
        rows.append(("endings", ", ".join(f"{name} {count}" for name, count in endings.items() if count)))
        if new > 0:
            left = (time.monotonic() - self._begun) / new * (tally.planned - done)
            rows.append(("left", f"{left:.0f} s"))
        if tally.waiting_for:
            rows.append(("endpoint", tally.waiting_for))
        if tally.stopped:
            rows.append(("stopping", tally.stopped))
        return rows

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
            self._live.update(Text("preparing"), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
