"""The store keeps every trajectory exactly, whatever kills the writer."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepswe.errors import StoreError
from deepswe.rollout.frames import Context, compress, count_frames, decompress
from deepswe.rollout.packed import pack_trajectory, unpack_trajectory
from deepswe.rollout.record import dump_trajectory, load_trajectory
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory, Ungraded


def trajectory(task: str = "a", attempt: int = 0, text: str = "hello") -> Trajectory:
    return Trajectory(
        task_id=task,
        attempt=attempt,
        phase="train",
        step=3,
        spans=(TokenSpan((1, 2), False), TokenSpan((3,), True, (-0.5,), 7)),
        steps=(Step(text, ToolCall("finish", {"command": "submit"}), "", "", 0.1, 0.2),),
        ending=Ending.SUBMITTED,
        grade=Graded(1.0, {"t.py::test[a b::c]": "passed"}),
        artifact="diff",
    )


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)


@settings(max_examples=50)
@given(
    text=ANY_TEXT,
    error=ANY_TEXT,
    logprobs=st.lists(st.floats(max_value=0, allow_nan=False), max_size=4) | st.lists(st.floats(width=32), max_size=4),
    seen=st.lists(st.integers(0, 70_000) | st.integers(0, 2**32 - 1), max_size=4),
)
def test_any_trajectory_survives_a_round_trip(text: str, error: str, logprobs: list[float], seen: list[int]) -> None:
    logprobs = [value if value == value else -1.0 for value in logprobs]  # no number equals itself
    original = Trajectory(
        task_id="t", attempt=1, phase="before", step=0,
        spans=(TokenSpan(tuple(seen), False), TokenSpan(tuple(range(len(logprobs))), True, tuple(logprobs), 2)),
        steps=(Step(text, ToolCall("x", {"k": text}), text), Step(text, None, "")),
        ending=Ending.ERROR, grade=Ungraded(error, "sandbox.start"), artifact=text, error=error,
    )  # fmt: skip
    line = dump_trajectory(original)
    assert line.count(b"\n") == 1
    assert load_trajectory(line) == original
    assert unpack_trajectory(decompress(compress(*pack_trajectory(original)), Context())) == original


def test_a_committed_batch_reads_back_in_the_order_of_its_attempts(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    segment, found = store.begin("train", 3, keep=True)
    assert found == ()
    with segment:
        for item in (trajectory("b", 1), trajectory("a", 0), trajectory("b", 0)):
            segment.append(item)
        assert store.committed("train", 3) is None
        segment.commit()
    batch = store.committed("train", 3)
    assert batch is not None
    assert [(t.task_id, t.attempt) for t in batch] == [("a", 0), ("b", 0), ("b", 1)]
    assert store.segments() == (("train", 3),)
    assert len(list(store.read("train"))) == 3
    assert list(store.read("before")) == []


@pytest.mark.parametrize("kept", [1, 7, 11, 12, 13, 60, -1])
def test_a_record_torn_anywhere_is_dropped_and_the_rest_taken_up(kept: int, tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    segment, _ = store.begin("train", 0, keep=True)
    with segment:
        segment.append(trajectory("a"))
    partial = tmp_path / "trajectories" / "train-000000.partial.zst"
    with partial.open("ab") as file:
        file.write(compress(*pack_trajectory(trajectory("b")))[:kept])
    assert count_frames(partial)[0] == 1
    assert [t.task_id for t in store.recorded("train", 0)] == ["a"]
    segment, found = store.begin("train", 0, keep=True)
    with segment:
        assert [t.task_id for t in found] == ["a"]
        segment.append(trajectory("b"))
        segment.commit()
    assert [t.task_id for t in store.read()] == ["a", "b"]


def test_a_batch_that_is_not_taken_up_goes_to_the_attic(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    segment, _ = store.begin("train", 0, keep=True)
    with segment:
        segment.append(trajectory())
    segment, found = store.begin("train", 0, keep=False)
    with segment:
        assert found == ()
        segment.commit()
    assert list(store.read()) == []
    assert len(list((tmp_path / "trajectories" / "abandoned").iterdir())) == 1


def test_a_committed_batch_is_never_opened_again(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    with store.begin("train", 0, keep=True)[0] as segment:
        segment.commit()
    with pytest.raises(StoreError, match="committed already"):
        store.begin("train", 0, keep=True)


def test_a_full_disk_is_one_clear_error_and_keeps_what_was_written(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    segment, _ = store.begin("train", 0, keep=True)
    with segment:
        segment.append(trajectory("a"))
        real, full = segment._fd, os.open("/dev/full", os.O_WRONLY)
        segment._fd = full
        with pytest.raises((StoreError, OSError)):
            segment.append(trajectory("b"))
        segment._fd = real
        os.close(full)
        segment.append(trajectory("c"))
        segment.commit()
    assert [t.task_id for t in store.read()] == ["a", "c"]


def committed(tmp_path: Path, *items: Trajectory) -> Path:
    with TrajectoryStore(tmp_path).begin("train", 3, keep=True)[0] as segment:
        for item in items:
            segment.append(item)
        segment.commit()
    return tmp_path / "trajectories" / "train-000003.zst"


def test_one_trajectory_is_read_without_the_others_of_its_batch(tmp_path: Path) -> None:
    path = committed(tmp_path, trajectory("b", 1), trajectory("a", 0), trajectory("b", 0, "x"))
    data = bytearray(path.read_bytes())
    data[20] ^= 0xFF  # the first record is damaged; who asks for another does not see it
    path.write_bytes(data)
    store = TrajectoryStore(tmp_path)
    assert store.get("train", 3, "b", 0) == trajectory("b", 0, "x")
    assert store.get("train", 3, "a", 0) == trajectory("a", 0)
    assert store.get("train", 3, "a", 1) is None
    assert store.get("train", 4, "a", 0) is None
    with pytest.raises(StoreError, match=r"train-000003\.zst"):
        store.get("train", 3, "b", 1)


@pytest.mark.parametrize("place", range(0, 400, 23))
def test_a_flipped_byte_anywhere_is_one_clear_error_that_names_the_file(place: int, tmp_path: Path) -> None:
    path = committed(tmp_path, trajectory("a"), trajectory("b"))
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"train-000003\.zst"):
        list(TrajectoryStore(tmp_path).read())


def test_a_committed_segment_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = committed(tmp_path, trajectory("a"), trajectory("b"))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(StoreError, match=r"train-000003\.zst: the index cannot be read"):
        list(TrajectoryStore(tmp_path).read())


def test_killed_between_the_index_and_the_rename_nothing_is_lost(tmp_path: Path) -> None:
    path = committed(tmp_path, trajectory("a"), trajectory("b"))
    path.rename(path.with_name("train-000003.partial.zst"))
    segment, found = TrajectoryStore(tmp_path).begin("train", 3, keep=True)
    with segment:
        segment.append(trajectory("c"))
        segment.commit()
    assert [t.task_id for t in found] == ["a", "b"]
    store = TrajectoryStore(tmp_path)
    assert [t.task_id for t in store.read()] == ["a", "b", "c"]
    assert store.get("train", 3, "c", 0) == trajectory("c")


def test_what_the_infrastructure_ended_is_made_again_and_the_index_knows(tmp_path: Path) -> None:
    failed = Trajectory("x", 0, "train", 3, (), (), Ending.ERROR, Ungraded("gone", "sandbox.start"))
    segment, _ = TrajectoryStore(tmp_path).begin("train", 3, keep=True)
    with segment:
        for item in (failed, trajectory("a"), trajectory("b")):
            segment.append(item)
    segment, found = TrajectoryStore(tmp_path).begin("train", 3, keep=True)
    with segment:
        assert [t.task_id for t in found] == ["a", "b"]
        segment.append(trajectory("x"))
        segment.commit()
    store = TrajectoryStore(tmp_path)
    assert [store.get("train", 3, name, 0) for name in "abx"] == [trajectory(name) for name in "abx"]
    assert len(list((tmp_path / "trajectories" / "abandoned").iterdir())) == 1


def test_a_store_of_lines_of_json_is_still_read(tmp_path: Path) -> None:
    place = tmp_path / "trajectories" / "train-000003.jsonl"
    place.parent.mkdir()
    place.write_bytes(dump_trajectory(trajectory("b")) + dump_trajectory(trajectory("a")))
    store = TrajectoryStore(tmp_path)
    assert [t.task_id for t in store.committed("train", 3) or ()] == ["a", "b"]
    assert store.get("train", 3, "a", 0) == trajectory("a")
    assert store.get("train", 3, "a", 1) is None
    assert store.segments() == (("train", 3),)
    with pytest.raises(StoreError, match="committed already"):
        store.begin("train", 3, keep=True)
    with place.open("ab") as file:
        file.write(b'{"task_id": 3}\n')
    with pytest.raises(StoreError, match=r"train-000003\.jsonl:3"):
        list(store.read())


@pytest.mark.parametrize("keep", [True, False])
def test_lines_of_json_in_flight_are_taken_up(keep: bool, tmp_path: Path) -> None:
    place = tmp_path / "trajectories" / "train-000003.partial.jsonl"
    place.parent.mkdir()
    place.write_bytes(dump_trajectory(trajectory("a")) + dump_trajectory(trajectory("b"))[:-20])
    store = TrajectoryStore(tmp_path)
    assert [t.task_id for t in store.recorded("train", 3)] == ["a"]
    segment, found = store.begin("train", 3, keep=keep)
    with segment:
        segment.append(trajectory("b"))
        segment.commit()
    assert [t.task_id for t in found] == ["a"] * keep
    assert [t.task_id for t in store.read()] == ["a"] * keep + ["b"]
    assert not place.exists()


def test_a_token_id_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    wrong = Trajectory("x", 0, "train", 3, (TokenSpan((-1,), False),), (), Ending.SUBMITTED, Graded(0.0))
    with TrajectoryStore(tmp_path).begin("train", 3, keep=True)[0] as segment, pytest.raises(StoreError, match="token"):
        segment.append(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task_id": None}, "task_id is a NoneType, not a str"),
        ({"attempt": "0"}, "attempt is a str, not a int"),
        ({"steps": ["x"]}, "not a trajectory record"),
        ({"tags": {"repo": 5}}, r"tags\['repo'\] is a int, not a str"),
        ({"artifact": 7}, "artifact is a int"),
        ({"wall_s": "1"}, "wall_s is a str, not a float"),
        ({"spans": [{"tokens": ["a"], "sampled": False, "logprobs": [], "version": 0}]}, r"spans\[0\]\.tokens\[0\]"),
        ({"grade": {"kind": "graded", "reward": float("nan")}}, "grade.reward is nan"),
        ({"grade": {"kind": "graded", "reward": "1"}}, "grade.reward is a str"),
    ],
)
def test_a_record_with_a_value_of_the_wrong_kind_is_refused_by_its_name(change: dict[str, object], said: str) -> None:
    record = json.loads(dump_trajectory(trajectory())) | change
    with pytest.raises(StoreError, match=said):
        load_trajectory(json.dumps(record))


def test_what_is_abandoned_replaces_no_older_record_also_where_one_was_deleted(tmp_path: Path) -> None:
    store, attic = TrajectoryStore(tmp_path), tmp_path / "trajectories" / "abandoned"
    for text in ("first", "second", "third"):
        segment, _ = store.begin("train", 0, keep=False)
        with segment:
            segment.append(trajectory("a", text=text))
    store.begin("train", 0, keep=False)[0].__exit__(None, None, None)
    assert [path.name[-8:] for path in sorted(attic.iterdir())] == ["0000.zst", "0001.zst", "0002.zst"]
    next(attic.glob("*-0000.zst")).unlink()
    kept = {path.name: path.read_bytes() for path in attic.iterdir()}
    store.begin("train", 0, keep=False)[0].__exit__(None, None, None)
    assert {name: (attic / name).read_bytes() for name in kept} == kept
    assert sorted(path.name[-8:] for path in attic.iterdir()) == ["0001.zst", "0002.zst", "0003.zst"]


def test_heads_are_the_attempts_without_their_tokens_and_texts(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    segment, _ = store.begin("train", 3, keep=True)
    with segment:
        for number in range(3):
            segment.append(trajectory(attempt=number))
        segment.commit()
    assert list(store.heads()) == [replace(whole, spans=(), steps=()) for whole in store.read()]
    assert list(store.heads("train")) == list(store.heads())
    assert not list(store.heads("before"))
