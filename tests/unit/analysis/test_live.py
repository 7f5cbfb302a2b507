"""The live view reads a run that another process is writing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deepswe.analysis.live import Watcher, sparkline
from deepswe.errors import RunError
from deepswe.rollout.frames import compress


def test_a_finished_run_is_seen_as_such(learned_run: Path) -> None:
    state = Watcher(learned_run).look()
    assert (state.status, state.step, state.imitation, state.batch) == ("finished", 60, 300, "")
    assert len(state.rewards) == 60
    assert {(row["split"], row["name"]) for row in state.evaluations} >= {("heldout", "before"), ("heldout", "after")}


def test_the_owner_decides_whether_it_runs(learned_run: Path) -> None:
    (learned_run / "summary.json").unlink()
    watcher = Watcher(learned_run)
    assert watcher.look().status == "stopped"
    (learned_run / "lock").write_text(f"{os.getpid()}\n", encoding="ascii")
    assert watcher.look().status == "running"


def test_attempts_in_flight_are_counted_as_they_come(learned_run: Path) -> None:
    watcher = Watcher(learned_run)
    partial, record = learned_run / "trajectories" / "train-000061.partial.zst", compress(b"{}\n")
    partial.write_bytes(record + record + record[:-1])
    assert (watcher.look().batch, watcher.look().done) == ("train step 62", 2)
    with partial.open("ab") as file:
        file.write(record[-1:])
    assert watcher.look().done == 3
    partial.write_bytes(record)
    assert watcher.look().done == 1


def test_a_run_that_is_no_more_is_one_clear_error(learned_run: Path) -> None:
    watcher = Watcher(learned_run)
    shutil.rmtree(learned_run)
    with pytest.raises(RunError, match="no directory"):
        watcher.look()


def test_bars_stay_within_their_marks() -> None:
    assert sparkline((0.0, 0.5, 1.0, 2.0, -1.0), 3) == "██▁"


def test_a_directory_that_is_no_run_is_not_shown_as_one(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        Watcher(tmp_path).look()
