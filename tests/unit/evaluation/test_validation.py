"""The verdict on a task, out of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from deepswe.errors import TaskError
from deepswe.evaluation.validation import (
    RunRecord,
    RunRow,
    Validation,
    fingerprint,
    in_random_order,
    judge_runs,
    with_validations,
    wrong_tests,
)
from deepswe.tasks.task import HiddenTests, Measured, Repository, Task, TaskSet
from deepswe.types import Graded

HIDDEN = HiddenTests("t", {}, ("f::1", "f::2"), ("p::1", "p::2"), gold_patch="x")


def runs(kind: str, *bad: Sequence[str], reason: str = "") -> list[RunRow]:
    return [
        RunRow(
            task="t",
            fingerprint="f",
            kind=kind,  # type: ignore[arg-type]
            number=number,
            order="given",
            reward=float(not tests and not reason),
            bad=dict.fromkeys(tests, "failed"),
            reason=reason,
            wall_s=1.0 + number,
        )
        for number, tests in enumerate(bad)
    ]


F2P = ("f::1", "f::2")


def test_task_whose_gold_passes_and_whose_noop_fails_every_time_is_sound() -> None:
    assert judge_runs(HIDDEN, runs("gold", (), (), ()), runs("noop", F2P, F2P, F2P)) == Validation(
        "t", "sound", runtime_s=2.0
    )


def test_test_that_changes_between_gold_runs_is_flaky() -> None:
    found = judge_runs(HIDDEN, runs("gold", (), ("p::2",), ()), runs("noop", F2P, F2P, F2P))
    assert (found.verdict, found.flaky) == ("flaky", ("p::2",))


def test_test_that_changes_between_noop_runs_is_flaky() -> None:
    found = judge_runs(HIDDEN, runs("gold", (), (), ()), runs("noop", F2P, ("f::1",), F2P))
    assert (found.verdict, found.flaky) == ("flaky", ("f::2",))


def test_gold_that_never_passes_is_unsound_and_the_network_is_named() -> None:
    gold = runs("gold", ("p::1",), ("p::1",), ("p::1",), reason="1 of 4 tests: p::1 failed (socket.gaierror: ...)")
    found = judge_runs(HIDDEN, gold, runs("noop", F2P, F2P, F2P))
    assert found.verdict == "unsound"
    assert "needs the network: p::1 is failed in all 3 runs" in found.reason


def test_noop_that_passes_is_unsound() -> None:
    found = judge_runs(HIDDEN, runs("gold", (), (), ()), runs("noop", (), (), ()))
    assert (found.verdict, found.reason) == ("unsound", "doing nothing passes every test")


def test_task_that_has_nothing_to_fix_without_its_flaky_tests_is_unsound() -> None:
    hidden = HiddenTests("t", {}, ("f::1",), ("p::1",), gold_patch="x")
    found = judge_runs(hidden, runs("gold", (), ("f::1",), ()), runs("noop", ("f::1",), (), ("f::1",)))
    assert (found.verdict, found.flaky) == ("unsound", ("f::1",))


def test_timeout_of_gold_is_unsound_and_one_of_noop_is_a_failure_like_others() -> None:
    slow = "the tests took more than 60 s"
    assert judge_runs(HIDDEN, runs("gold", F2P, F2P, reason=slow), runs("noop", F2P, F2P)).reason.startswith("timeout")
    everything = (*F2P, "p::1", "p::2")
    late = [*runs("noop", F2P), *runs("noop", everything, reason=slow)]
    assert judge_runs(HIDDEN, runs("gold", (), ()), late).verdict == "sound"


def test_gold_patch_that_does_not_apply_is_unsound() -> None:
    gold = runs("gold", (), (), reason="the patch does not apply: it names no file")
    assert "does not apply" in judge_runs(HIDDEN, gold, runs("noop", F2P, F2P)).reason


def tasks_of(hidden: HiddenTests) -> TaskSet:
    return TaskSet((Task("t", "r", "", Repository(), "test", "train"),), {"t": hidden}, {"t": Measured(attempts=3)})


def test_what_a_sources_parser_counts_as_right_is_not_held_against_the_gold_patch() -> None:
    script = replace(HIDDEN, runner="script", parser="pytest")
    statuses = {"f::1": "passed", "f::2": "xfailed", "p::1": "skipped", "p::2": "failed"}
    assert wrong_tests(script, Graded(0.0, statuses)) == {"p::2": "failed"}
    assert wrong_tests(script, Graded(1.0, statuses | {"p::2": "skipped"})) == {}
    assert set(wrong_tests(HIDDEN, Graded(0.0, statuses))) == {"f::2", "p::1", "p::2"}
    exact = replace(script, parser="r2e-gym", expected={"p::2": "failed"})
    assert set(wrong_tests(exact, Graded(0.0, statuses))) == {"f::2", "p::1"}


def test_flaky_tests_are_quarantined_by_id_and_the_task_is_then_another_one() -> None:
    before = tasks_of(HIDDEN)
    after = with_validations(before, [Validation("t", "flaky", "two", ("f::2", "p::1"), 1.5)])
    hidden = after.hidden["t"]
    assert (hidden.fail_to_pass, hidden.pass_to_pass) == (("f::1",), ("p::2",))
    assert hidden.quarantined == ("f::2", "p::1")
    assert after.measured["t"] == Measured("flaky", "two", 1.5, attempts=3)
    assert fingerprint(before, before.tasks[0]) != fingerprint(after, after.tasks[0])


def test_random_order_of_unittest_keeps_the_tests_and_of_a_script_changes_nothing() -> None:
    task = tasks_of(HIDDEN).tasks[0]
    many = HiddenTests("t", {}, tuple(f"f::{n}" for n in range(20)), tuple("ab"), runner="unittest")
    mixed = in_random_order(task, many, 1)
    assert mixed.fail_to_pass != many.fail_to_pass
    assert sorted(mixed.tests) == sorted(many.tests)
    script = HiddenTests("t", {}, ("a",), (), runner="script")
    assert in_random_order(task, script, 1) is script


def test_record_is_resumed_only_when_asked_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record = RunRecord(path, resume=False)
    [row] = runs("gold", F2P)
    record.add(row)
    with path.open("a") as stream:
        stream.write('{"task": "t", "fing')
    with pytest.raises(TaskError, match="add --resume"):
        RunRecord(path, resume=False)
    again = RunRecord(path, resume=True)
    assert again.find("t", "f", "gold", 0) == row
    assert again.find("t", "other", "gold", 0) is None
    again.add(row)
    assert path.read_text().count("\n") == 2


@pytest.mark.parametrize("text", ["notes", '{"title": "mine"}', "x" * 100])
def test_a_file_of_somebody_else_is_refused_as_a_record_and_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    for resume in (False, True):
        with pytest.raises(TaskError, match="no record of a validation"):
            RunRecord(path, resume=resume)
    assert path.read_text() == text


def test_the_torn_first_line_of_a_record_goes_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text('{"task":"a","finger')
    record = RunRecord(path, resume=True)
    assert not record.rows
    [row] = runs("gold", F2P)
    record.add(row)
    assert path.read_text().count("\n") == 1
