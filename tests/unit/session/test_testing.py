"""Why a task got no generated test."""

from __future__ import annotations

from deepswe.scaling.checks import Checks
from deepswe.session.testing import why_none
from deepswe.tasks.task import Repository, Task
from deepswe.types import Ending, Graded, Trajectory


def task(issue: str) -> Task:
    return Task("t", "shop", issue, Repository(), "mutation", "train")


def tried(reason: str) -> Trajectory:
    return Trajectory("t", 0, "tests", 0, (), (), Ending.SUBMITTED, Graded(0.0, reason=reason))


def test_a_task_without_tests_has_a_reason() -> None:
    none, dropped = Checks("t", "unittest", {}), Checks("t", "unittest", {}, dropped={"a": "flaky", "b": "flaky"})
    assert why_none(task("It is wrong."), none, [tried("")]) == "no failing call in the issue"
    assert why_none(task("It is wrong."), none, [tried("it is too long")]) == "it is too long"
    assert why_none(task("It is wrong."), dropped, []) == "flaky"
    assert why_none(task("`price(1)` gives `1` instead of `2`."), none, []) == "no test was written"
