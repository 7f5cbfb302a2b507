"""The groups of an evaluation's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepswe.evaluation.summary import summarise
from deepswe.types import Ending, Graded, Trajectory


def by_repo(repos: Sequence[str]) -> dict[str, Any]:
    held = [
        Trajectory(f"t{n}", 0, "e", 0, (), (), Ending.SUBMITTED, Graded(float(n % 2)), tags={"repo": repo})
        for n, repo in enumerate(repos)
    ]
    by: dict[str, Any] = summarise(held, planned=len(held))["by"]
    return by


def test_groups_have_two_tasks_on_average_or_are_no_table() -> None:
    assert [(row["name"], row["tasks"]) for row in by_repo("aaab")["repo"]] == [("a", 3), ("b", 1)]
    assert by_repo("abcd") == {}
    assert by_repo("aab") == {}
    assert by_repo("aaaa") == {}
