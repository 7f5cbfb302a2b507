"""A pipe that nobody writes to holds no reader up: not in a run, and not as a file that a command is given."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepswe.analysis.live import Watcher
from deepswe.analysis.record import read_run
from deepswe.config import load_recipe
from deepswe.errors import DeepsweError
from deepswe.evaluation.evaluations import read_manifest
from deepswe.evaluation.results import read_report
from deepswe.jsonl import read_lines
from deepswe.regular import open_regular, read_regular
from deepswe.rollout.frames import compress
from deepswe.rollout.store import TrajectoryStore
from deepswe.scaling.candidates import load_candidates
from deepswe.session.cassette_play import load_tape
from deepswe.tasks.sources_rows import read_rows
from deepswe.tasks.taskset import load_task_set
from deepswe.training.metrics import MetricsLog
from deepswe.training.run import read_json

pytestmark = pytest.mark.timeout(20)


def test_a_regular_file_is_read_whole_and_a_link_to_one_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"some\nlines")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "a") == read_regular(tmp_path / "link") == b"some\nlines"
    with open_regular(tmp_path / "a") as file:
        assert list(file) == [b"some\n", b"lines"]


def test_anything_else_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(error):
            read_regular(path)
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="no regular file"):
            read_regular(path)
    with pytest.raises(OSError, match="no regular file"):
        read_lines(tmp_path / "pipe")
    assert read_lines(tmp_path / "none") == ([], b"")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.jsonl", read_run),
        ("metrics.jsonl", lambda run: Watcher(run).look()),
        ("recipe.json", read_run),
        ("evaluations.json", read_manifest),
        ("trajectories/train-000001.zst", lambda run: list(TrajectoryStore(run).read())),
        ("trajectories/train-000001.jsonl", lambda run: list(TrajectoryStore(run).read())),
        ("trajectories/train-000001.zst", lambda run: TrajectoryStore(run).get("train", 1, "a", 0)),
        ("trajectories/train-000001.partial.zst", lambda run: TrajectoryStore(run).recorded("train", 1)),
        ("trajectories/train-000001.partial.zst", lambda run: TrajectoryStore(run).begin("train", 1, keep=True)),
        ("r.toml", lambda run: load_recipe(run / "r.toml")),
        ("r.json", lambda run: read_json(run / "r.json")),
        ("r.json", lambda run: read_report(run / "r.json")),
        ("r.traj", load_candidates),
        ("tape.jsonl", lambda run: load_tape(run / "tape.jsonl")),
        ("set.jsonl", lambda run: load_task_set(run / "set.jsonl")),
        ("rows.jsonl", lambda run: list(read_rows(run / "rows.jsonl"))),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_one_error_at_once(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(DeepsweError, match="no regular file"):
        read(tmp_path)


def test_a_writer_of_metrics_and_a_count_of_records_are_not_held_up_either(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="no regular file"):
        MetricsLog(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "trajectories").mkdir()
    os.mkfifo(tmp_path / "trajectories" / "train-000001.partial.zst")
    with pytest.raises(OSError, match="no regular file"):
        Watcher(tmp_path).look()
    (tmp_path / "trajectories" / "train-000001.partial.zst").unlink()
    (tmp_path / "trajectories" / "train-000001.partial.zst").write_bytes(compress(b"{}\n"))
    assert Watcher(tmp_path).look().done == 1
