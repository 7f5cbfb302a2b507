"""Each source's rows become tasks; each row that cannot be used is told; no answer reaches the public part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepswe.errors import ConfigError, StoreError
from deepswe.tasks.sources import Imported, import_rows, import_tasks
from deepswe.tasks.sources_rows import Row
from deepswe.tasks.task import HiddenTests, Task
from deepswe.tasks.taskset import load_task_set, save_task_set

from .source_rows import (
    F2P,
    P2P,
    PATCH,
    TEST_PATCH,
    r2e_row,
    swebench5_row,
    swebench_row,
    swegym_row,
    swerebench_row,
    swesmith_row,
)

MAKERS = {
    "r2e-gym": r2e_row,
    "swe-bench": swebench_row,
    "swe-smith": swesmith_row,
    "swe-gym": swegym_row,
    "swe-rebench": swerebench_row,
}


def imported(*records: Any, source: str = "auto") -> Imported:
    return import_rows((Row(number, record) for number, record in enumerate(records, 1)), source)


def only(record: Any, source: str = "auto") -> tuple[Task, HiddenTests]:
    answer = imported(record, source=source)
    assert answer.refused == ()
    (task,) = answer.tasks.tasks
    return task, answer.tasks.hidden[task.id]


def public_text(task: Task) -> str:
    assert task.image is not None
    return repr(dataclasses.replace(task, image=dataclasses.replace(task.image, patch="")))


@pytest.mark.parametrize("source", MAKERS)
def test_a_row_of_each_source_becomes_a_task_without_its_answer(source: str) -> None:
    task, hidden = only(MAKERS[source](), source)
    assert (task.source, task.evaluation) == (source, source == "swe-bench")
    assert task.image is not None
    assert hidden.runner == "script"
    for secret in ("return a + b", "the answer is b", "test_add", "use plus", "test_two"):
        assert secret not in public_text(task)


@pytest.mark.parametrize("source", [name for name in MAKERS if name != "swe-bench"])
def test_auto_tells_the_source_by_the_columns(source: str) -> None:
    assert only(MAKERS[source]())[0].source == source


def test_auto_takes_a_row_of_a_benchmarks_repository_for_the_benchmarks() -> None:
    for repo in ("django/django", "PyCQA/pylint", "https://github.com/psf/requests.git"):
        task, _ = only(swegym_row(repo=repo))
        assert (task.source, task.evaluation, task.split) == ("swe-bench", True, "test")


def test_test_lists_may_be_json_text_or_lists() -> None:
    for row in (swebench_row(), swegym_row()):
        _, hidden = only(row, "swe-bench")
        assert (hidden.fail_to_pass, hidden.pass_to_pass) == (tuple(F2P), tuple(P2P))


def test_a_row_of_swe_bench_5_brings_image_script_and_parser() -> None:
    row = swebench5_row()
    task, hidden = only(row)
    assert task.image is not None
    assert task.image.name == "registry/acme:1"
    assert (hidden.parser, hidden.test_patch) == ("swebench:parse_log_pytest", "")
    recorded = [line for line in hidden.script.split("\n") if "code" in line]
    assert recorded == ["tests_code=$?", 'echo ">>>>> Test Exit Code: $tests_code"']
    assert [line for line in hidden.script.split("\n") if line not in recorded] == row["eval_script"].split("\n")


def test_an_older_row_gets_the_published_image_and_the_repositorys_command() -> None:
    task, hidden = only(swebench_row(repo="django/django", instance_id="django__django-1"), "swe-bench")
    assert task.image is not None
    assert task.image.name == "swebench/sweb.eval.x86_64.django_1776_django-1:latest"
    assert "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 'test_core'" in hidden.script
    assert hidden.test_patch == TEST_PATCH


def test_the_patch_of_swe_smith_is_the_bug_and_its_reverse_the_gold_patch() -> None:
    task, hidden = only(swesmith_row())
    assert task.image is not None
    assert task.image.patch == PATCH
    assert task.image.hide == ("/testbed/tests/test_core.py",)
    assert (task.repo, task.base_commit, task.kind) == ("acme/tool", "0123abcd", "func_basic")
    assert "+    return a - b\n" in hidden.gold_patch
    assert "-    return a + b\n" in hidden.gold_patch


def test_r2e_keeps_the_statuses_that_are_not_passed() -> None:
    task, hidden = only(r2e_row())
    assert task.problem_statement == "It gives a."
    assert hidden.pass_to_pass == ("TestA.test_one", "test_two[a - b]", "test_three")
    assert set(hidden.expected.values()) == {"failed", "error"}
    assert "TestA.test_one" not in hidden.expected
    assert hidden.gold_patch.startswith("diff --git a/pkg/core.py b/pkg/core.py")
    assert "test_core" not in hidden.gold_patch


BAD: list[tuple[str, Callable[..., dict[str, Any]], dict[str, Any], str]] = [
    ("swe-bench", swebench_row, {"problem_statement": " \n"}, "problem_statement is empty"),
    ("swe-smith", swesmith_row, {"problem_statement": ""}, "problem_statement is empty"),
    ("swe-bench", swebench_row, {"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS names no test"),
    ("swe-bench", swebench_row, {"FAIL_TO_PASS": "[tests"}, "FAIL_TO_PASS is no JSON"),
    ("swe-gym", swegym_row, {"FAIL_TO_PASS": {"a": 1}}, "FAIL_TO_PASS is an object, not a list"),
    ("swe-gym", swegym_row, {"PASS_TO_PASS": F2P}, "is in FAIL_TO_PASS and in PASS_TO_PASS"),
    ("swe-gym", swegym_row, {"problem_statement": 7}, "problem_statement is the int 7, not text"),
    ("swe-gym", swegym_row, {"problem_statement": "\ud800"}, "no Unicode"),
    ("swe-gym", swegym_row, {"test_patch": PATCH.replace("pkg/core", "../core")}, "outside the repository"),
    ("swe-gym", swegym_row, {"patch": "not a diff"}, "no unified diff"),
    ("swe-smith", swesmith_row, {"image_name": None, "repo": "swesmith/a__b.01234567"}, "image_name is empty"),
    ("swe-smith", swesmith_row, {"patch": ""}, "there is no bug"),
    ("swe-rebench", swerebench_row, {"install_config": {"python": "3.9"}}, "no test_cmd"),
    ("r2e-gym", r2e_row, {"docker_image": ""}, "docker_image is empty"),
    ("r2e-gym", r2e_row, {"expected_output_json": "{}"}, "names no test"),
    ("r2e-gym", r2e_row, {"expected_output_json": '{"test_a": "MAYBE"}'}, "unknown status 'MAYBE'"),
    ("r2e-gym", r2e_row, {"expected_output_json": None, "repo_name": "a"}, "not a map from test to status"),
]


@pytest.mark.parametrize(("source", "maker", "change", "reason"), BAD, ids=[row[3] for row in BAD])
def test_a_row_that_cannot_be_used_is_refused_and_the_rest_goes_on(
    source: str, maker: Callable[..., dict[str, Any]], change: dict[str, Any], reason: str
) -> None:
    good = swegym_row(instance_id="good__good-1")
    answer = import_rows([Row(1, maker(**change)), Row(2, MAKERS[source]()), Row(3, good)], source)
    assert answer.rows == 3
    assert len(answer.tasks.tasks) + len(answer.refused) == 3
    assert reason in answer.refused[0].reason
    assert answer.refused[0].id == Row(1, maker(**change)).id


def test_a_second_row_of_the_same_id_is_refused() -> None:
    answer = imported(swegym_row(), swegym_row())
    assert len(answer.tasks.tasks) == 1
    assert "same id" in answer.refused[0].reason


def test_a_truncated_file_gives_its_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = "".join(json.dumps(swegym_row(instance_id=f"a__b-{n}")) + "\n" for n in range(3))
    path.write_text(text[:-40])
    answer = import_tasks(path)
    assert (answer.rows, len(answer.tasks.tasks)) == (3, 2)
    assert answer.refused[0].id == "row 3"
    assert "no JSON" in answer.refused[0].reason


def test_json_lines_json_and_parquet_give_the_same_tasks(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [swegym_row(), swegym_row(instance_id="a__b-2")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "map.json").write_text(json.dumps({row["instance_id"]: row for row in rows}))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    answers = [import_tasks(tmp_path / name) for name in ("rows.jsonl", "rows.json", "map.json", "rows.parquet")]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].rows == 2


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet", "rows.jsonl.zst"])
def test_a_file_that_is_none_is_refused_whole(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"{broken")
    with pytest.raises(StoreError, match=name):
        import_tasks(tmp_path / name)


def test_a_missing_file_and_an_unknown_source_are_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        import_tasks(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="there are auto, r2e-gym"):
        import_tasks(tmp_path, "r2")


def harbor_directory(root: Path, name: str, **change: str | None) -> None:
    files: dict[str, str | None] = {
        "task.toml": '[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 30\n',
        "instruction.md": "Make it add.",
        "environment/Dockerfile": "FROM python:3.11\nWORKDIR /srv/app\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "tests/check.py": "assert True\n",
        **change,
    }
    for path, text in files.items():
        if text is not None:
            (root / name / path).parent.mkdir(parents=True, exist_ok=True)
            (root / name / path).write_text(text)


def test_directories_of_harbor_become_tasks(tmp_path: Path) -> None:
    harbor_directory(tmp_path, "add")
    harbor_directory(tmp_path, "no-statement", **{"instruction.md": ""})
    harbor_directory(tmp_path, "no-tests", **{"tests/test.sh": None})
    harbor_directory(tmp_path, "no-image", **{"environment/Dockerfile": None})
    harbor_directory(tmp_path, "no-toml", **{"task.toml": "= broken"})
    answer = import_tasks(tmp_path)
    assert (answer.rows, [task.id for task in answer.tasks.tasks]) == (5, ["add"])
    (task,), (hidden,) = answer.tasks.tasks, answer.tasks.hidden.values()
    assert task.image is not None
    assert "mv /srv/app /testbed" in task.image.setup
    assert task.tags["build"] == f"docker build -t {task.image.name} add/environment"
    assert (hidden.timeout_s, hidden.files["/tests/check.py"]) == (30.0, "assert True\n")
    reasons = {row.id: row.reason for row in answer.refused}
    assert "instruction is empty" in reasons["no-statement"]
    assert "test_sh is empty" in reasons["no-tests"]
    assert "no image" in reasons["no-image"]
    assert "cannot be read" in reasons["no-toml"]


def test_a_link_out_of_a_harbor_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    harbor_directory(tmp_path / "tasks", "add")
    (tmp_path / "tasks/add/tests/link").symlink_to(tmp_path / "secret")
    answer = import_tasks(tmp_path / "tasks")
    assert "leads out of" in answer.refused[0].reason


@pytest.mark.parametrize("ending", [".parquet", ".jsonl.zst"])
def test_tasks_of_all_sources_come_back_from_a_file(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = [maker() for maker in MAKERS.values()]
    rows[1] = swebench5_row(instance_id="other__one-1")
    rows[3] = swegym_row(instance_id="another__one-1")
    answer = imported(*rows)
    assert len(answer.tasks.tasks) == len(MAKERS)
    save_task_set(answer.tasks, tmp_path / f"set{ending}")
    assert load_task_set(tmp_path / f"set{ending}") == answer.tasks
