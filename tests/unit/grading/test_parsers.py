"""Logs become verdicts as each benchmark defines them, and agree with the official reports."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from deepswe.errors import GradingError
from deepswe.grading.parsers import SwebenchReport, _swebench_is_5, judge, pytest_statuses, r2e_statuses, read_log
from deepswe.tasks.sources import import_tasks
from deepswe.tasks.task import HiddenTests, Image, Repository, Task

START, END = "+ : '>>>>> Start Test Output'", "+ : '>>>>> End Test Output'"
DATA = os.environ.get("DEEPSWE_TEST_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="DEEPSWE_TEST_DATA names no folder with recorded reports")
needs_swebench = pytest.mark.skipif(
    importlib.util.find_spec("swebench") is None, reason="the swebench package is not installed"
)


def task_of(**more: object) -> Task:
    return Task("t-1", "acme/tool", "It fails.", Repository(), "own", "train", image=Image("i"), **more)  # type: ignore[arg-type]


def hidden_of(f2p: tuple[str, ...], p2p: tuple[str, ...] = (), parser: str = "pytest", **more: object) -> HiddenTests:
    return HiddenTests("t-1", {}, f2p, p2p, "script", parser=parser, **more)  # type: ignore[arg-type]


LINES = [
    ("tests/t.py::test_a PASSED                   [ 10%]", "tests/t.py::test_a", "passed"),
    ("PASSED tests/t.py::test_a", "tests/t.py::test_a", "passed"),
    ("[gw1] [ 42%] FAILED tests/t.py::test_a", "tests/t.py::test_a", "failed"),
    ("FAILED tests/t.py::test_a - AssertionError: a - b", "tests/t.py::test_a", "failed"),
    ("FAILED tests/t.py::test_a[x - y] - assert 1 - 2 == 3", "tests/t.py::test_a[x - y]", "failed"),
    ("tests/t.py::test_a[a b: [c]::d] PASSED [100%]", "tests/t.py::test_a[a b: [c]::d]", "passed"),
    ("PASSED tests/t.py::test_a[a b: [c]::d]", "tests/t.py::test_a[a b: [c]::d]", "passed"),
    ("PASSED tests/t.py::test_a[PASSED ]", "tests/t.py::test_a[PASSED ]", "passed"),
    ("\x1b[32mPASSED\x1b[0m tests/t.py::\x1b[1mtest_a\x1b[0m", "tests/t.py::test_a", "passed"),
    ("XFAIL tests/t.py::test_a - known", "tests/t.py::test_a", "xfailed"),
    ("XPASS tests/t.py::test_a - known", "tests/t.py::test_a", "xpassed"),
    ("tests/t.py::test_a XFAIL (known bug)        [ 10%]", "tests/t.py::test_a", "xfailed"),
    ("tests/t.py::test_a SKIPPED (no network)     [ 10%]", "tests/t.py::test_a", "skipped"),
    ("ERROR tests/t.py::test_a - RuntimeError", "tests/t.py::test_a", "error"),
    ("ERROR tests/t.py - ImportError: no module", "tests/t.py::test_a", "error"),
    ("tests/t.py::test_a [part] SUBFAIL           [ 10%]", "tests/t.py::test_a", "failed"),
    ("SUBFAIL tests/t.py::test_a - assert 0", "tests/t.py::test_a", "failed"),
    ("SUBFAILED[part one] tests/t.py::test_a - assert 0", "tests/t.py::test_a", "failed"),
    ("SUBFAILED(i=1) tests/t.py::test_a - assert 0", "tests/t.py::test_a", "failed"),
    ("SKIPPED [3] tests/t.py:7: no network", "tests/t.py::test_a", None),
    ("the code prints PASSED", "tests/t.py::test_a", None),
    ("PASSED tests/t.py::test_ab", "tests/t.py::test_a", None),
]


@pytest.mark.parametrize(("line", "test", "status"), LINES, ids=[str(number) for number in range(len(LINES))])
def test_a_line_of_pytest_gives_a_status_to_the_full_id(line: str, test: str, status: str | None) -> None:
    assert pytest_statuses(f"{START}\n{line}\n{END}\n", frozenset({test})).get(test) == status


def test_what_is_printed_outside_of_the_markers_does_not_count() -> None:
    log = f"PASSED t.py::a\n{START}\nFAILED t.py::a\n{END}\nPASSED t.py::a\n"
    assert pytest_statuses(log, frozenset({"t.py::a"})) == {"t.py::a": "failed"}


@pytest.mark.parametrize("order", [1, -1])
def test_a_test_that_is_reported_twice_has_its_worst_status(order: int) -> None:
    lines = ["PASSED t.py::a", "ERROR t.py::a - teardown"][::order]
    assert pytest_statuses("\n".join(lines), frozenset({"t.py::a"})) == {"t.py::a": "error"}


TABLE = [  # status, right as F2P, right as P2P
    ("passed", True, True),
    ("xfailed", True, True),
    ("skipped", False, True),
    ("xpassed", False, False),
    ("failed", False, False),
    ("error", False, False),
    ("missing", False, False),
]


@pytest.mark.parametrize(("status", "f2p", "p2p"), TABLE)
def test_the_table_says_which_statuses_count(status: str, f2p: bool, p2p: bool) -> None:
    found = {} if status == "missing" else {"a": status, "b": status}
    assert judge(found, hidden_of(("a",), ("b",))).right == frozenset({"a"} if f2p else ()) | frozenset(
        {"b"} if p2p else ()
    )


def test_an_expected_status_must_be_that_very_one() -> None:
    hidden = hidden_of(("a",), ("b", "c"), expected={"b": "failed", "c": "error"})
    assert judge({"a": "passed", "b": "failed", "c": "failed"}, hidden).right == {"a", "b"}
    assert judge({"a": "passed", "b": "passed", "c": "error"}, hidden).right == {"a", "c"}


def test_a_log_without_a_failure_of_tests_that_ended_otherwise_is_not_believed() -> None:
    log = f"{START}\nPASSED t.py::a\n{END}\n>>>>> Test Exit Code: 1\n"
    assert "exit code 1" in read_log(log, task_of(), hidden_of(("t.py::a",))).problem
    assert read_log(log.replace("Code: 1", "Code: 0"), task_of(), hidden_of(("t.py::a",))).problem == ""
    failed = log.replace(END, f"FAILED t.py::b\n{END}")
    assert read_log(failed, task_of(), hidden_of(("t.py::a",))).problem == ""


R2E_LOG = """collected
=== short test summary info ===
PASSED r2e_tests/test_1.py::TestA::test_one
PASSED r2e_tests/test_1.py::test_two[a - b]
FAILED r2e_tests/test_1.py::test_bad - assert 1 - 1
ERROR r2e_tests/test_2.py::test_broken
=== 2 passed ===
"""


def test_r2e_compares_the_whole_map_and_keeps_expected_failures() -> None:
    names = ("TestA.test_one", "test_two[a - b]", "test_bad", "test_broken")
    hidden = hidden_of((), names, "r2e-gym", expected={"test_bad": "failed", "test_broken": "error"})
    reading = read_log(R2E_LOG, task_of(), hidden)
    assert (reading.right, reading.problem) == (frozenset(names), "")
    fixed = read_log(R2E_LOG.replace("FAILED", "PASSED").replace(" - assert 1 - 1", ""), task_of(), hidden)
    assert set(names) - fixed.right == {"test_bad"}
    missing = read_log(R2E_LOG.replace("ERROR", "x"), task_of(), hidden)
    assert missing.statuses["test_broken"] == "missing"
    more = read_log(R2E_LOG + "PASSED r2e_tests/test_1.py::test_new\n", task_of(), hidden)
    assert "test_new" in more.problem


def test_of_two_results_with_one_r2e_key_the_last_counts() -> None:
    log = "short test summary info\nFAILED a.py::test_a - x\nPASSED b.py::test_a\n"
    assert r2e_statuses(log, frozenset({"test_a"})) == {"test_a": "passed"}


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("deepswe-harbor-reward: 1", True),
        ("deepswe-harbor-reward: 1.0 ", True),
        ('deepswe-harbor-reward: {"reward": 1} ', True),
        ("deepswe-harbor-reward: 0", False),
        ("deepswe-harbor-reward: 0.5", False),
        ("deepswe-harbor-reward: yes", False),
        ("deepswe-harbor-reward: 1\ndeepswe-harbor-reward: 0", False),
        ("", False),
    ],
)
def test_harbors_reward_is_the_last_number_that_the_verifier_left(line: str, right: bool) -> None:
    hidden = hidden_of(("tests/test.sh",), parser="harbor")
    assert bool(read_log(f"noise\n{line}\n", task_of(), hidden).right) is right


def test_a_script_that_did_not_come_to_its_tests_has_no_verdict() -> None:
    hidden = hidden_of(("t.py::a",), script=": '>>>>> Start Test Output'")
    with pytest.raises(GradingError, match="did not come as far"):
        read_log("conda: command not found", task_of(), hidden)


def test_an_unknown_parser_is_no_verdict() -> None:
    with pytest.raises(GradingError, match="unknown parser 'nose'"):
        read_log("", task_of(), hidden_of(("a",), parser="nose"))


@needs_data
def test_every_status_of_the_recorded_reports_of_swesmith_agrees() -> None:
    reports = sorted(Path(DATA or "").glob("swesmith/*/report.json"))
    assert reports
    for path in reports:
        official = json.loads(path.read_text())
        lists = official["tests_status"]
        names = {kind: [*lists[kind]["success"], *lists[kind]["failure"]] for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        hidden = hidden_of(tuple(names["FAIL_TO_PASS"]), tuple(names["PASS_TO_PASS"]))
        reading = read_log((path.parent / "test_output.txt").read_text(), task_of(), hidden)
        right = {test for kind in names for test in lists[kind]["success"]}
        assert reading.right == right
        assert (len(reading.right) == len(hidden.tests)) == official["resolved"]


needs_5 = pytest.mark.skipif(not _swebench_is_5(), reason="these fixtures are for swebench 5")


@needs_swebench
@needs_5
@pytest.mark.parametrize(("status", "f2p", "p2p"), [row for row in TABLE if row[0] != "xpassed"])
def test_the_table_is_the_one_of_swebench_5(status: str, f2p: bool, p2p: bool) -> None:
    word = {"passed": "PASSED", "xfailed": "XFAIL", "missing": ""}.get(status, status.upper())
    lines = f"{word} t.py::a\n{word} t.py::b\nPASSED t.py::c\n" if word else "PASSED t.py::c\n"
    log = f"{START}\n{lines}{END}\n"
    hidden = hidden_of(("t.py::a",), ("t.py::b",), "swebench:parse_log_pytest", script=": '>>>>> Start Test Output'")
    official = read_log(log, task_of(), hidden)
    ours = judge(pytest_statuses(log, frozenset(hidden.tests)), hidden)
    assert official.right == ours.right
    assert ("t.py::a" in official.right, "t.py::b" in official.right) == (f2p, p2p)
    assert official.statuses == ours.statuses


@needs_swebench
@needs_5
def test_an_exit_code_that_contradicts_the_log_is_no_success() -> None:
    hidden = hidden_of(("t.py::a",), parser="swebench:parse_log_pytest", script=": '>>>>> Start Test Output'")
    log = f"{START}\nPASSED t.py::a\n{END}\n>>>>> Test Exit Code: 1\n"
    reading = read_log(log, task_of(), hidden)
    assert reading.right == frozenset()
    assert reading.problem


@needs_swebench
@needs_5
@needs_data
def test_swebench_rows_are_graded_by_the_parser_of_their_repository() -> None:
    resolved = 0
    for path in sorted(Path(DATA or "").glob("swebench/*.json*")):
        tasks = import_tasks(path).tasks
        for task in tasks.tasks:
            if task.source != "swe-bench":
                continue
            hidden = tasks.hidden[task.id]
            if "django" in task.repo or "sympy" in task.repo:
                continue  # their parsers read other lines
            lines = "".join(f"PASSED {test}\n" for test in hidden.tests)
            log = f"{START}\n{lines}{END}\n>>>>> Test Exit Code: 0\n"
            report = SwebenchReport.of(log, task, hidden)
            assert report.resolved == (len(report.right) == len(hidden.tests))
            resolved += report.resolved
            assert report.right <= set(hidden.tests)
            half = SwebenchReport.of(log.replace(f"PASSED {hidden.tests[0]}\n", ""), task, hidden)
            assert not half.resolved
    assert resolved >= 3


@needs_swebench
def test_a_repository_without_a_parser_is_no_verdict() -> None:
    with pytest.raises(GradingError, match="parser"):
        read_log("", task_of(), hidden_of(("t.py::a",), parser="swebench:"))
