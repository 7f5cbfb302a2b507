"""Rows reach TensorBoard as they are, and a writer that fails leaves the run alone."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepswe.errors import ConfigError, TrainingError
from deepswe.progress import Silent
from deepswe.training.metrics import MetricsLog
from deepswe.training.writers import Mirror, TrackedWriter, open_writers, scalars


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "time_s": 1.7e9 + step, **values}


def read_events(directory: Path) -> list[tuple[str, int, float]]:
    """The scalars of the event files: length, its checksum, a record, its checksum, over and over."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            at += length + 16
    return found


def test_only_finite_numbers_are_scalars_and_their_names_say_kind_and_split() -> None:
    assert scalars(row(1, loss=0.5, updates=2, ok=True, note="x", bad=math.inf, warnings=[])) == {
        "train/loss": 0.5,
        "train/updates": 2.0,
    }
    assert scalars({"kind": "evaluation", "step": 0, "split": "heldout", "name": "before", "pass_at_1": 0.25}) == {
        "evaluation/heldout/pass_at_1": 0.25
    }


def test_tensorboard_gets_every_row_once_also_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    for steps in ((1, 2), (2, 3)):
        mirror = open_writers(["tensorboard"], tmp_path, {}, Silent())
        log = MetricsLog(tmp_path / "metrics.jsonl", mirror)
        for step in steps:
            log.write(row(step, reward_mean=step / 4))
        log.close()
    assert read_events(tmp_path / "tensorboard") == [("train/reward_mean", step, step / 4) for step in (1, 2, 3)]


class Failing:
    """Fails at its second row."""

    def __init__(self) -> None:
        self.rows = 0

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows += 1
        if self.rows == 2:
            raise TrainingError("the disk is full")

    def close(self) -> None:
        raise AssertionError("it was left out")


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_a_writer_that_fails_is_said_once_and_left_out(tmp_path: Path) -> None:
    said, failing = Said(), Failing()
    log = MetricsLog(tmp_path / "metrics.jsonl", Mirror({"broken": failing}, said))
    assert all(log.write(row(step)) for step in range(4))
    log.close()
    assert failing.rows == 2
    assert said.lines == ["broken gets no more metrics: the disk is full"]
    assert len(MetricsLog(tmp_path / "metrics.jsonl").rows) == 4


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'pip install "deepswe\[nowhere_to_be_found\]"'):
        TrackedWriter("nowhere_to_be_found", tmp_path, {})
