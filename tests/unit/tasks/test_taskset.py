"""The task store: what is saved comes back, and a damaged file is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepswe.errors import StoreError, TaskError
from deepswe.tasks.task import HiddenTests, Image, Measured, Repository, Task, TaskSet
from deepswe.tasks.taskset import FORMATS, load_task_set, save_task_set, task_set_card, task_set_hash

pytest.importorskip("pyarrow")
pytest.importorskip("zstandard")

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
MAPS = st.dictionaries(TEXT, TEXT, max_size=3)
LISTS = st.lists(TEXT, max_size=3).map(tuple)
TASKS = st.builds(
    Task,
    id=TEXT,
    repo=TEXT,
    problem_statement=TEXT,
    repository=st.builds(Repository, st.none() | TEXT, st.none() | TEXT, MAPS, LISTS, LISTS),
    source=TEXT,
    split=TEXT,
    kind=TEXT,
    tags=MAPS,
    image=st.none() | st.builds(Image, TEXT, TEXT, TEXT, LISTS, MAPS),
    evaluation=st.booleans(),
)
HIDDEN = st.builds(
    HiddenTests,
    task_id=TEXT,
    files=MAPS,
    fail_to_pass=LISTS,
    pass_to_pass=LISTS,
    runner=st.sampled_from(["pytest", "unittest", "script"]),
    timeout_s=st.floats(0, 1e6),
    expected=MAPS,
    script=TEXT,
)
MEASURED = st.none() | st.builds(Measured, runtime_s=st.none() | st.floats(0, 1e6), attempts=st.integers(0, 9))


def assemble(rows: list[tuple[Task, HiddenTests, Measured | None]]) -> TaskSet:
    tasks = tuple(task for task, _, _ in rows)
    hidden = {task.id: dataclasses.replace(tests, task_id=task.id) for task, tests, _ in rows}
    return TaskSet(tasks, hidden, {task.id: measured for task, _, measured in rows if measured is not None})


SETS = st.lists(st.tuples(TASKS, HIDDEN, MEASURED), max_size=4, unique_by=lambda row: row[0].id).map(assemble)


def plain(name: str = "a", repo: str = "r", **more: object) -> Task:
    return Task(name, repo, "It fails.", Repository(), "own", "train", **more)  # type: ignore[arg-type]


def hidden_of(task: Task) -> HiddenTests:
    return HiddenTests(task.id, {}, ("t.py::test_a",), ("t.py::test_b", "t.py::test_c"))


def set_of(*tasks: Task) -> TaskSet:
    return TaskSet(tasks, {task.id: hidden_of(task) for task in tasks})


@pytest.mark.parametrize("ending", FORMATS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tasks=SETS)
def test_any_set_comes_back_exactly(tasks: TaskSet, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"set{ending}"
    assert save_task_set(tasks, path) == task_set_hash(tasks)
    assert load_task_set(path) == tasks
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_hash_sees_order_and_content_but_no_measurement() -> None:
    one, two = plain("a"), plain("b")
    tasks = set_of(one, two)
    assert task_set_hash(tasks) != task_set_hash(set_of(two, one))
    assert task_set_hash(tasks) != task_set_hash(set_of(one, plain("b", kind="other")))
    rated = dataclasses.replace(tasks, measured={"a": Measured("sound", attempts=4, solved=1)})
    assert task_set_hash(rated) == task_set_hash(tasks)


def test_the_hash_of_a_set_does_not_change_with_the_version_of_the_program() -> None:
    assert task_set_hash(set_of(plain())) == "sha256:daaebdf9592a6486d35d7fbdcac0bede9bb7dbc8fba9b9f4ec09106b221ec368"


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_that_was_cut_off_is_no_set(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"set{ending}"
    save_task_set(set_of(plain("a"), plain("b")), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreError, match=r"set\."):
        load_task_set(path)


def test_a_lost_line_and_a_changed_line_are_found(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    save_task_set(set_of(plain("a"), plain("b")), path)
    header, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + first)
    with pytest.raises(StoreError, match="1 tasks where its header says 2"):
        load_task_set(path)
    path.write_bytes(header + first + second.replace(b"test_b", b"test_x"))
    with pytest.raises(StoreError, match="was changed"):
        load_task_set(path)


def test_a_field_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    save_task_set(set_of(plain()), path)
    header, row = map(json.loads, path.read_text().splitlines())
    row["task"]["colour"] = "red"
    path.write_text(f"{json.dumps(header)}\n{json.dumps(row)}\n")
    with pytest.raises(StoreError, match=r"task\.colour"):
        load_task_set(path)


def test_two_tasks_of_one_id_and_a_task_without_hidden_tests_are_refused(tmp_path: Path) -> None:
    task = plain()
    with pytest.raises(TaskError, match="two tasks have the id 'a'"):
        save_task_set(TaskSet((task, task), {"a": hidden_of(task)}), tmp_path / "set.jsonl")
    with pytest.raises(TaskError, match="no hidden tests"):
        save_task_set(TaskSet((task,), {}), tmp_path / "set.jsonl")
    assert not list(tmp_path.iterdir())


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    for ending in FORMATS:
        with pytest.raises(TaskError, match="no Unicode"):
            save_task_set(set_of(plain(kind="\ud800")), tmp_path / f"set{ending}")


def test_a_name_of_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"\.parquet, \.jsonl\.zst, \.jsonl"):
        save_task_set(set_of(plain()), tmp_path / "set.csv")


def test_the_card_counts() -> None:
    tasks = set_of(plain("a", "x", license="MIT"), plain("b", "y", tags={"difficulty": "hard"}), plain("c", "x"))
    tasks = dataclasses.replace(tasks, measured={"a": Measured("sound", runtime_s=2.0), "b": Measured(runtime_s=4.0)})
    card = task_set_card(tasks)
    assert card["hash"] == task_set_hash(tasks)
    assert card["repositories"] == {"x": 2, "y": 1}
    assert card["licenses"] == {"": 2, "MIT": 1}
    assert card["difficulties"] == {"": 2, "hard": 1}
    assert card["verdicts"] == {"": 2, "sound": 1}
    assert (card["fail_to_pass"], card["pass_to_pass"]) == (1.0, 2.0)
    assert card["runtime_s"] == {"measured": 2, "total": 6.0, "median": 3.0, "max": 4.0}


def test_a_part_of_a_set_keeps_order_and_what_belongs_to_it() -> None:
    tasks = dataclasses.replace(set_of(plain("a"), plain("b"), plain("c")), measured={"b": Measured("flaky")})
    part = tasks.only(["c", "b"])
    assert [task.id for task in part.tasks] == ["b", "c"]
    assert set(part.hidden) == {"b", "c"}
    assert set(part.measured) == {"b"}
