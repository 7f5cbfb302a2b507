"""Behaviour in numbers, by hand arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_records import DIFF

from deepswe.analysis.behaviour_profile import compare_solved, count_loops, drift, profile, summarise
from deepswe.analysis.behaviour_run import analyse_run
from deepswe.errors import RunError
from deepswe.types import Step, TokenSpan, ToolCall, Trajectory

NewAttempt = Callable[..., Trajectory]
VIEW = Step("", ToolCall("file_editor", {"command": "view", "path": "cart.py"}), "1\tx")
EDIT = Step(
    "", ToolCall("file_editor", {"command": "str_replace", "path": "cart.py", "old_str": "a", "new_str": "b"}), ""
)
FAILED = Step("", ToolCall("file_editor", {"command": "view", "path": "no.py"}), "no.py does not exist", "no_path")
TESTS = Step("", ToolCall("execute_bash", {"cmd": "pytest -q"}), "exit code 0")
FINISH = Step("", ToolCall("finish", {"command": "submit"}), "")


def test_a_submission_whose_last_edit_was_never_tested_is_untested(new_attempt: NewAttempt) -> None:
    def untested(*steps: Step) -> bool:
        return profile(new_attempt("cart-1", 0, "train", 1, True, steps=steps)).untested

    assert untested(VIEW, EDIT, FINISH)
    assert untested(EDIT, TESTS, EDIT, FINISH)
    assert not untested(EDIT, TESTS, FINISH)
    assert not untested(VIEW, FINISH)


def test_first_edit_rhythm_and_errors_by_tool(new_attempt: NewAttempt) -> None:
    found = profile(new_attempt("cart-1", 0, "train", 1, True, steps=(FAILED, VIEW, EDIT, EDIT, TESTS, FINISH)))
    assert (found.first_edit, found.first_reproduction, found.rhythm) == (3, None, "ET")
    assert found.errors == {"file_editor": 1}
    assert summarise([found])["errors"] == {"execute_bash": 0.0, "file_editor": 0.25, "finish": 0.0}


def test_touched_files_are_compared_with_the_gold_patch(new_attempt: NewAttempt) -> None:
    attempt = new_attempt("cart-1", 0, "train", 1, True)
    other = profile(attempt, DIFF.replace("cart.py", "other.py") + DIFF)
    assert summarise([other])["gold_recall"] == 0.5
    assert summarise([other])["gold_precision"] == 1.0
    assert summarise([profile(attempt)])["gold_recall"] is None
    assert summarise([profile(attempt)])["habits"]["touched_gold_file"] is None


def test_loops_are_a_call_thrice_or_a_cycle_twice() -> None:
    assert count_loops([VIEW, VIEW]) == 0
    assert count_loops([VIEW, VIEW, VIEW]) == 3
    assert count_loops([VIEW, TESTS, VIEW, TESTS, FINISH]) == 4
    assert count_loops([Step("", None, "")] * 4) == 0


def test_thinking_is_the_share_of_a_turns_tokens_before_its_call(new_attempt: NewAttempt) -> None:
    call = "<function=finish>\n</function>"
    step = Step("t" * len(call) + call, ToolCall("finish", {}), "")
    spans = (TokenSpan((1,), False), TokenSpan(tuple(range(10)), True, (-0.1,) * 10))
    found = profile(new_attempt("cart-1", 0, "train", 1, True, steps=(step,), spans=spans))
    assert found.thinking == {"finish": 5.0}


def test_solved_and_unsolved_are_compared_within_tasks(new_attempt: NewAttempt) -> None:
    profiles = [
        profile(new_attempt(f"cart-{task}", number, "train", 1, solved, steps=steps))
        for task in range(3)
        for number, (solved, steps) in enumerate(((True, (EDIT, TESTS, FINISH)), (False, (EDIT, FINISH)), (None, ())))
    ]
    found = compare_solved(profiles)
    assert found["solved"]["attempts"] == found["unsolved"]["attempts"] == 3
    assert found["differences"]["tested"]["mean"] == 1.0
    assert found["differences"]["submitted_untested"]["mean"] == -1.0
    assert found["differences"]["undid"]["mean"] == 0.0


def test_drift_has_groups_of_steps_that_follow_each_other(new_attempt: NewAttempt) -> None:
    rows = drift([profile(new_attempt("cart-1", 0, "train", step, True)) for step in range(5)], bins=2)
    assert [(row["first_step"], row["last_step"], row["attempts"]) for row in rows] == [(0, 2, 3), (3, 4, 2)]


def test_no_profiles_give_zeros_and_no_error() -> None:
    assert summarise([])["attempts"] == 0
    assert summarise([])["share"]["edit"] == 0.0


def test_a_run_is_analysed_whole_and_by_phase(learned_run: Path) -> None:
    found = analyse_run(learned_run)
    assert sum(phase["attempts"] for phase in found["phases"].values()) == found["all"]["attempts"] == 144
    assert found["drift"][0]["first_step"] == 60
    assert found["gold_known"] == 0
    json.dumps(found, allow_nan=False)
    with pytest.raises(RunError, match="'nowhere'"):
        analyse_run(learned_run, phase="nowhere")
