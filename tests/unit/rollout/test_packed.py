"""A packed record is exact, or refused with one error; and those of earlier versions are read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deepswe.errors import StoreError
from deepswe.rollout.frames import Context, decompress, read_frames
from deepswe.rollout.packed import pack_trajectory, unpack_trajectory
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory, Ungraded, Usage

FORMAT_1 = Path(__file__).parents[2] / "golden" / "format-1.zst"
"""A segment of `RECORDED` that commit 4717cba wrote."""

SHORT = Trajectory(
    task_id="a",
    attempt=0,
    phase="train",
    step=3,
    spans=(TokenSpan((1, 2), False), TokenSpan((3,), True, (-0.5,), 7)),
    steps=(Step("hello", ToolCall("finish", {"command": "submit"}), "", "", 0.1, 0.2),),
    ending=Ending.SUBMITTED,
    grade=Graded(1.0, {"t.py::test[a b::c]": "passed"}),
    artifact="diff",
)
RECORDED = (
    SHORT,
    replace(
        SHORT,
        attempt=1,
        spans=(TokenSpan((70_000, 3, 2**32 - 1), False), TokenSpan((9,), True, (-0.1,), 2), TokenSpan((), False)),
        steps=(
            Step("thé\ud800", ToolCall("file_editor", {"command": "view", "path": "ü", "": "\0\n"}), "─ … 🙂", "", 1.5),
            Step("", None, "", "no_call"),
        ),
        ending=Ending.ERROR,
        grade=Ungraded("gone", "sandbox.start"),
        tags={"repo": "lib"},
        starts=(1,),
    ),
    replace(SHORT, attempt=2, spans=(), steps=(), usage=(Usage(10, 5, 2, 0.25, True), Usage(1, 0, 1))),
)


def changed(record: bytes, change: dict[str, object]) -> bytes:
    """With other values in its line of JSON."""
    head, _, rest = record.partition(b"\n")
    return json.dumps(json.loads(head) | change).encode() + b"\n" + rest


def test_what_was_recorded_comes_back() -> None:
    assert [unpack_trajectory(b"".join(pack_trajectory(item))) for item in RECORDED] == list(RECORDED)


def test_a_segment_of_format_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    shutil.copy(FORMAT_1, tmp_path / "trajectories" / "train-000003.zst")
    store = TrajectoryStore(tmp_path)
    assert tuple(store.read()) == RECORDED
    assert store.get("train", 3, "a", 1) == RECORDED[1]


def test_records_of_format_1_in_flight_are_taken_up_and_go_on_in_format_2(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    with FORMAT_1.open("rb") as file:
        frames = b"".join(frame.data for frame in read_frames(file))
    (tmp_path / "trajectories" / "train-000003.partial.zst").write_bytes(frames)
    more = replace(SHORT, task_id="b")
    segment, found = TrajectoryStore(tmp_path).begin("train", 3, keep=True, settled={"a"})
    with segment:
        segment.append(more)
        segment.commit()
    assert found == RECORDED
    assert TrajectoryStore(tmp_path).committed("train", 3) == (*RECORDED, more)


@pytest.mark.parametrize(
    "change",
    [
        {"task_id": None},
        {"format": 3},
        {"format": None},
        {"kinds": [["finish", 3, "command"]]},
        {"kinds": [[5, "", "command"]]},
        {"kinds": [["finish", "", 1]]},
        {"kinds": [["finish"]]},
        {"kinds": [[None, "", "command"]]},
        {"kinds": [["finish", ""]]},
        {"kinds": [["finish", "", "command", "path"]]},
        {"kinds": []},
        {"counts": [1, 3, 11, 2, 0]},
        {"counts": [1, 3, 11, -2]},
        {"counts": [1, 3, 11, 2.0]},
        {"counts": [True, 3, 11, 2]},
        {"counts": [1, 3, 10, 2]},
        {"counts": [1, 3, 12, 2]},
        {"counts": [1, 3, 11, 10**30]},
        {"counts": [0, 0, 0, 0]},
        {"codes": "If"},
        {"codes": "Hd"},
        {"codes": "Hx"},
        {"codes": "H"},
        {"codes": 5},
        {"grade": {"kind": "graded", "reward": float("inf")}},
        {"usage": [[1, 2]]},
    ],
)
def test_a_record_with_a_value_of_the_wrong_kind_is_refused(change: dict[str, object]) -> None:
    record = b"".join(pack_trajectory(SHORT))
    assert unpack_trajectory(changed(record, {})) == SHORT
    with pytest.raises(StoreError, match="not a packed trajectory"):
        unpack_trajectory(changed(record, change))


@pytest.mark.parametrize(
    "change",
    [
        {"task_id": None},
        {"steps": [[5], [0], ["finish"], [["command"]], [[6]], [3], [0.1], [0.2]]},
        {"steps": [[5], [0], ["finish"], [[1]], [[6]], [""], [0.1], [0.2]]},
        {"steps": [[5], [0], ["finish"], [["command"]], [[600]], [""], [0.1], [0.2]]},
        {"steps": [[5], [-5], ["finish"], [["command"]], [[6]], [""], [0.1], [0.2]]},
        {"steps": [[5], [0], ["finish"], [["command"]], [[6]], [""], ["0.1"], [0.2]]},
        {"steps": [[], [], [], [], [], [], []]},
        {"spans": [[2, 2], [False, True], [0, 7], False, "f"]},
        {"spans": [[2, 1], [0, 1], [0, 7], False, "f"]},
        {"spans": [[2, 1], [False, True], [0, 7], False, "x"]},
        {"spans": [[2, 1], [False, True], [0, 7], True, "f"]},
        {"spans": [[2, 1], [False, True], [0, 7]]},
    ],
)
def test_a_record_of_format_1_with_a_value_of_the_wrong_kind_is_refused(change: dict[str, object]) -> None:
    with FORMAT_1.open("rb") as file:
        record = decompress(next(read_frames(file)).data, Context())
    assert unpack_trajectory(changed(record, {})) == SHORT
    with pytest.raises(StoreError, match="not a packed trajectory"):
        unpack_trajectory(changed(record, change))


def test_a_record_cut_anywhere_is_refused() -> None:
    record = b"".join(pack_trajectory(RECORDED[1]))
    for size in range(len(record)):
        with pytest.raises(StoreError, match="not a packed trajectory"):
            unpack_trajectory(record[:size])
    with pytest.raises(StoreError, match="not a packed trajectory"):
        unpack_trajectory(record + b"\0")


@pytest.mark.parametrize("span", [TokenSpan((-1,), False), TokenSpan((2**32,), False), TokenSpan((1,), False, (), -1)])
def test_a_number_that_cannot_be_recorded_is_refused(span: TokenSpan) -> None:
    with pytest.raises(StoreError, match="cannot be recorded"):
        pack_trajectory(replace(SHORT, spans=(span,)))
