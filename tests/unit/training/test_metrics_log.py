"""metrics.jsonl: each row once, whatever was killed when."""

from pathlib import Path

import pytest

from deepswe.errors import StoreError
from deepswe.training.metrics import MetricsLog, read_rows


def test_a_row_is_written_once_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    assert log.write({"kind": "train", "step": 1, "reward_mean": 0.5})
    assert not log.write({"kind": "train", "step": 1, "reward_mean": 0.9})
    assert log.write({"kind": "evaluation", "step": 1, "split": "a", "name": "before"})
    assert log.write({"kind": "evaluation", "step": 1, "split": "b", "name": "before"})
    log.close()
    again = MetricsLog(path)
    assert not again.write({"kind": "train", "step": 1, "reward_mean": 0.9})
    assert again.find("train", step=1) == [{"kind": "train", "step": 1, "reward_mean": 0.5}]
    again.close()
    assert len(read_rows(path)) == 3


def test_a_torn_last_row_is_dropped_and_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tra')
    log = MetricsLog(path)
    assert log.write({"kind": "train", "step": 2})
    log.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_a_number_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        log.write({"kind": "train", "step": 1, "loss": float("nan")})
    log.close()


@pytest.mark.parametrize("line", [b"{]", b"[" * 200_000, b"[]", b'{"step": 2}', b'{"kind": "train", "step": "2"}'])
def test_a_damaged_row_names_its_line_for_readers_and_for_the_writer(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n' + line + b"\n")
    for read in (read_rows, MetricsLog):
        with pytest.raises(StoreError, match=r"metrics\.jsonl:2"):
            read(path)
