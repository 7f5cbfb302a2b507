"""Each turn is in the class that a person gave it, and the rule says what it saw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepswe.analysis.behaviour import Action, Seen, classify, thought_of
from deepswe.analysis.behaviour_shell import Purpose, main_command, read_commands
from deepswe.types import Step, ToolCall

GOLDEN = Path(__file__).parents[2] / "golden"


def step(tool: str, answer: str = "", thought: str = "", error: str = "", **arguments: str) -> Step:
    return Step(thought, ToolCall(tool, arguments), answer, error)


def bash(cmd: str, answer: str = "exit code 0", thought: str = "") -> Step:
    return step("execute_bash", answer, thought, cmd=cmd)


def edit(path: str = "pkg/a.py", old: str = "a", new: str = "b", error: str = "") -> Step:
    return step("file_editor", f"Edited {path}", "", error, command="str_replace", path=path, old_str=old, new_str=new)


def actions(*steps: Step) -> list[Action]:
    return [seen.action for seen in classify(steps)]


def agreement(half: str) -> tuple[int, int]:
    agreed = steps = 0
    for attempt in json.loads((GOLDEN / f"behaviour_{half}.json").read_text(encoding="utf-8")):
        rows: list[list[Any]] = attempt["steps"]
        turns = [Step(row[1], ToolCall(row[2], row[3]) if row[2] else None, row[4], row[5]) for row in rows]
        agreed += sum(row[0] == seen.action for row, seen in zip(rows, classify(turns), strict=True))
        steps += len(rows)
    return agreed, steps


def test_there_are_200_steps_labelled_by_hand() -> None:
    assert agreement("tuned")[1] + agreement("held_out")[1] == 200


@pytest.mark.parametrize("half", ["tuned", "held_out"])
def test_nine_in_ten_labels_agree(half: str) -> None:
    agreed, steps = agreement(half)
    assert agreed / steps >= 0.9


def test_the_same_tests_are_run_before_an_edit_and_regression_after_it() -> None:
    assert actions(bash("pytest -q"), edit(), bash("pytest -q")) == ["run_tests", "edit", "regression_test"]


def test_an_edit_that_failed_changes_nothing() -> None:
    assert actions(edit(error="no_match"), bash("python x.py"))[1] == Action.REPRODUCE


def test_what_showed_the_issue_is_the_check_after_the_edit() -> None:
    again = bash("python -c 'import a; print(a.f(None, []))'")
    assert actions(again, edit(), again) == ["reproduce", "edit", "run_tests"]


def test_further_inputs_after_an_edit_are_edge_cases_and_named_as_evidence() -> None:
    seen = classify([edit(), bash("python -c 'import a; print(a.f(None, []))'")])[1]
    assert (seen.action, seen.evidence) == (Action.EDGE_TEST, "None, []")


def test_a_call_is_a_repeat_only_while_nothing_changed() -> None:
    tests = bash("pytest -q", "exit code 1")
    assert actions(edit(), tests, tests) == ["edit", "regression_test", "repeat"]
    assert actions(edit(), tests, edit(new="c"), tests)[3] == Action.REGRESSION_TEST


def test_the_tests_without_the_change_are_debugging() -> None:
    assert actions(edit(), bash("git stash && pytest -q; git stash pop"))[1] == Action.DEBUG


def test_undoing_is_an_edit_and_no_new_change_of_the_source() -> None:
    undone = classify([edit(), step("file_editor", "Undid", command="undo_edit", path="pkg/a.py")])[1]
    assert (undone.action, undone.undo, undone.source) == (Action.EDIT, True, False)


@pytest.mark.parametrize("error", ["no_call", "unknown_tool", "malformed_call"])
def test_a_turn_without_a_call_is_other_and_failed(error: str) -> None:
    assert classify([Step("words", None, "", error)])[0] == Seen(
        Action.OTHER, "no call that can be carried out", error, failed=True
    )


@pytest.mark.parametrize(
    ("script", "purpose"),
    [
        ("cd /testbed && FOO=1 timeout 60 python -m pytest -q 2>&1 | tail -3", Purpose.TEST),
        ("grep -rn 'a | b' src | head", Purpose.SEARCH),
        ("find . -name '*.py'", Purpose.EXPLORE),
        ("find . -name 'conf*.py'", Purpose.SEARCH),
        ("cat a.py | grep x", Purpose.READ),
        ("cat pyproject.toml", Purpose.EXPLORE),
        ("git diff && git status", Purpose.READ),
        ("sed -n 1,20p a.py", Purpose.READ),
        ("sed -i s/a/b/ a.py", Purpose.CHANGE),
        ("python - <<'EOF'\nopen('a.py', 'w').write('x')\nEOF", Purpose.CHANGE),
        ("cat > a.py <<EOF\nx = 'don't'\nEOF", Purpose.WRITE),
        ("rm -rf build && ls", Purpose.TIDY),
        ("echo 'unbalanced", Purpose.NEUTRAL),
    ],
)
def test_the_purpose_of_a_script_is_that_of_its_main_command(script: str, purpose: Purpose) -> None:
    command = main_command(read_commands(script))
    assert command is not None
    assert command.purpose is purpose


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(), max_size=60), max_size=5))
def test_any_text_is_read_without_an_error(scripts: list[str]) -> None:
    seen = classify([bash(text, text, text) for text in scripts])
    assert len(seen) == len(scripts)
    assert all(len(one.evidence) <= 200 for one in seen)


def test_a_thought_is_what_stands_before_the_call() -> None:
    assert thought_of("<think>Look.</think>\n<function=finish>\n</function>") == "Look."
    assert thought_of("only words") == "only words"


def test_behaviour_needs_no_torch() -> None:
    script = (
        "import sys, deepswe.analysis.behaviour_run, deepswe.analysis.viewer.page; "
        "assert not {'torch', 'numpy', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
