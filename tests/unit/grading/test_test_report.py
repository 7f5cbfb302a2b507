from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepswe.grading.grade import decide
from deepswe.grading.report import STATUSES, Report, read_report
from deepswe.sandbox.base import ExecResult
from deepswe.tasks.task import HiddenTests
from deepswe.types import Graded, Ungraded

NONCE = "5eed"


def record(number: int, kind: str, status: str, test: str = "", detail: str = "", nonce: str = NONCE) -> bytes:
    texts = " ".join(text.encode().hex() or "-" for text in (test, detail))
    return f"{nonce} {number} {kind} {status} {texts}\n".encode()


def report(*rows: tuple[str, ...]) -> bytes:
    return b"".join(record(number, *row) for number, row in enumerate(rows))


GOOD = (("begin", "ok"), ("test", "passed", "a::x"), ("test", "failed", "a::y[b: c]", "why"), ("end", "ok"))


def test_a_complete_report_gives_each_status() -> None:
    found = read_report(report(*GOOD), NONCE)
    assert found.statuses == {"a::x": "passed", "a::y[b: c]": "failed"}
    assert found.details == {"a::y[b: c]": "why"}
    assert (found.started, found.problem, found.broken) == (True, "", "")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (report(*GOOD[:-1]), "before its report was complete"),
        (report(*GOOD)[:-5], "within a record"),
        (report(*GOOD) + b"x\n", "line 5"),
        (report(*GOOD, ("test", "passed", "z")), "after its end"),
        (report(*GOOD[:2]) + record(5, "end", "ok"), "line 3"),
        (report(*GOOD[:1]) + record(1, "test", "passed", "a::x", nonce="f0") + record(2, "end", "ok"), "line 2"),
        (report(*GOOD[:2], *GOOD[1:]), "a::x was reported twice"),
        (report(("begin", "ok"), ("test", "passed", "a"), ("end", "tampered")), "meddled"),
        (report(*GOOD[:2], ("changed", "error", "", "case.run"), GOOD[3]), "replaced a part"),
        (report(*GOOD[1:]), "did not start"),
        (b"", "did not start"),
    ],
)
def test_an_incomplete_or_foreign_report_has_a_problem(data: bytes, says: str) -> None:
    assert says in read_report(data, NONCE).problem


def test_a_failed_part_or_cleanup_outweighs_the_pass_of_its_test() -> None:
    rows = (("part", "failed", "a"), ("test", "passed", "a"), ("test", "passed", "b"), ("fixture", "error", "b"))
    found = read_report(report(("begin", "ok"), *rows, ("end", "ok")), NONCE)
    assert found.statuses == {"a": "failed", "b": "error"}
    assert not found.problem


LINES = st.one_of(
    st.builds(record, st.integers(0, 4), st.sampled_from(["begin", "test", "part", "end"]), st.sampled_from(STATUSES)),
    st.sampled_from([record(n, *row) for n, row in enumerate(GOOD)]),
    st.binary(max_size=20).map(lambda data: data + b"\n"),
)


@given(st.lists(LINES, max_size=6).map(b"".join), st.binary(max_size=10))
def test_no_bytes_raise_and_no_pass_is_made_up(data: bytes, tail: bytes) -> None:
    found = read_report(data + tail, NONCE)
    for test, status in found.statuses.items():
        if status == "passed":
            assert f" test passed {test.encode().hex() or '-'} ".encode() in data + tail


@given(st.binary(max_size=60))
def test_a_report_without_its_nonce_gives_nothing(data: bytes) -> None:
    assert not read_report(data, "").statuses
    assert read_report(report(*GOOD), "other").statuses == {}


HIDDEN = HiddenTests(
    "t", {"tests/test_a.py": ""}, ("a::x",), ("a::y",), gold_patch="--- a/setup.cfg\n+++ b/setup.cfg\n"
)
DONE = ExecResult(0, b"", b"")


def test_reward_needs_every_test_and_a_whole_report() -> None:
    passed = {"a::x": "passed", "a::y": "passed"}
    assert decide(DONE, Report(passed, started=True), HIDDEN) == Graded(1.0, passed)
    cut = decide(DONE, Report(passed, started=True, problem="cut"), HIDDEN)
    assert isinstance(cut, Graded)
    assert cut.reward == 0
    late = decide(ExecResult(137, b"", b"", timed_out=True), Report(passed, started=True), HIDDEN)
    assert isinstance(late, Graded)
    assert late.reward == 0


@pytest.mark.parametrize("status", [*STATUSES[1:], "missing"])
def test_only_passed_is_a_pass(status: str) -> None:
    statuses = {"a::x": "passed"} | ({"a::y": status} if status != "missing" else {})
    verdict = decide(DONE, Report(statuses, {"a::y": "why\nmore"}, started=True), HIDDEN)
    assert isinstance(verdict, Graded)
    assert verdict.reward == 0
    assert verdict.statuses["a::y"] == status
    assert verdict.reason == f"1 of 2 tests did not pass: a::y {status} (why)"


def test_a_runner_that_cannot_start_is_no_verdict() -> None:
    verdict = decide(ExecResult(127, b"", b"no python3"), Report(), HIDDEN)
    assert verdict == Ungraded("the test runner did not start (exit code 127): no python3", "grading.runner")
    assert isinstance(decide(DONE, Report(started=False, broken="no pytest"), HIDDEN), Ungraded)


SENTINELS = frozenset({"a::s"})


def reason(report: Report) -> str:
    verdict = decide(DONE, report, HIDDEN, SENTINELS)
    assert isinstance(verdict, Graded)
    assert verdict.reward == (0.0 if verdict.reason else 1.0)
    assert set(verdict.statuses) == {"a::x", "a::y"}
    return verdict.reason


def test_a_reward_needs_the_sentinels_to_fail() -> None:
    passed = {"a::x": "passed", "a::y": "passed"}
    for status in ("failed", "error"):
        assert reason(Report({**passed, "a::s": status}, started=True)) == ""
    assert "forged" in reason(Report({**passed, "a::s": "passed"}, started=True))
    assert "forged" in reason(Report({**passed, "a::s": "skipped"}, started=True))
    assert "forged" in reason(Report(passed, started=True))
    assert "nobody asked for" in reason(Report({**passed, "a::s": "failed", "b::z": "passed"}, started=True))


def test_the_death_of_a_guarded_reporter_is_no_verdict() -> None:
    data = record(0, "begin", "ok", "", "guarded") + record(1, "test", "passed", "a::x")
    verdict = decide(ExecResult(137, b"", b""), read_report(data, NONCE), HIDDEN)
    assert isinstance(verdict, Ungraded)
    assert verdict.place == "grading.reporter"
    assert "cut off (exit code 137)" in verdict.error
    unguarded = record(0, "begin", "ok", "", "unguarded") + record(1, "test", "passed", "a::x")
    assert isinstance(decide(ExecResult(137, b"", b""), read_report(unguarded, NONCE), HIDDEN), Graded)
    late = decide(ExecResult(137, b"", b"", timed_out=True), read_report(data, NONCE), HIDDEN)
    assert isinstance(late, Graded)


def test_a_task_may_expect_another_status() -> None:
    hidden = replace(HIDDEN, expected={"a::y": "failed"})
    assert decide(DONE, Report({"a::x": "passed", "a::y": "failed"}, started=True), hidden).kind == "graded"
    verdict = decide(DONE, Report({"a::x": "passed", "a::y": "failed"}, started=True), hidden)
    assert isinstance(verdict, Graded)
    assert verdict.reward == 1
