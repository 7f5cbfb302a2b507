import ast
import random

import pytest

from deepswe.scaling.checks import find_tests
from deepswe.scaling.writing_script import (
    NO_CALL,
    NO_ERROR,
    NO_VALUE,
    PATH,
    missing_in,
    module_text,
    read_report,
    write_by_script,
)
from deepswe.tasks.synth.issue import STYLES, Case, Outcome, Sight
from deepswe.tasks.synth.micro.generate import micro_task

CALL = "amber_crate([2, 6], 2, 1)"


@pytest.mark.parametrize(
    "issue",
    [
        f"In `river.py`, `{CALL}` returns `[]`, but should return `[25, 29]`.",
        f"`river.py`: `{CALL}` raises TypeError, expected `[25, 29]`.",
        f"`{CALL}` returns `[]` instead of `[25, 29]`, see `river.py`.",
        f"Wrong result in `river.py`:\n`{CALL}` returns `[]`, expected `[25, 29]`.",
    ],
)
def test_the_failing_call_and_its_right_value_are_read_from_the_issue(issue: str) -> None:
    report = read_report(issue)
    assert report is not None
    assert (report.call, report.wanted, report.module, report.names) == (CALL, "[25, 29]", "river", ("amber_crate",))


def test_code_blocks_are_read_with_what_is_right_and_not_what_is_wrong() -> None:
    issue = (
        "# `has` is wrong\n\n```python\nfrom toolz.functoolz import has\nx = 1\nhas(x)\n```\n\n"
        "Before:\n\n```\nFalse\n```\n\nNow:\n\n```\nTrue\n```\n"
    )
    report = read_report(issue)
    assert report is not None
    assert (report.setup, report.call, report.wanted) == ("from toolz.functoolz import has\nx = 1", "has(x)", "False")
    session = "```pycon\n>>> from a.b import T\n>>> t = T()\n>>> t.h\n[1]\n```\n\nI expected `[]`.\n"
    report = read_report(session)
    assert report is not None
    assert (report.module, report.call, report.wanted, report.names) == ("a.b", "t.h", "[]", ("T",))


RUN = "```python\nfrom shop import price\nprice(1)\n```\n\n"


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("gives an error, `ValueError: percent` instead of `0.0`.", "0.0"),
        ("gives `1` instead of `2`. Please make sure that related inputs are right, too.", "2"),
        ("gives `1` instead of an error, `ValueError: percent`.", "ValueError: percent"),
    ],
)
def test_what_is_right_stands_after_instead_of(said: str, wanted: str) -> None:
    report = read_report(f"Wrong result of `price`\n\nIn shop 0.1, this\n\n{RUN}{said}")
    assert report is not None
    assert report.wanted == wanted


def test_an_error_that_is_wanted_is_asked_for_as_one() -> None:
    report = read_report(f"{RUN}Before:\n\n```\nValueError: percent\n```\n\nNow:\n\n```\n3\n```\n")
    assert report is not None
    text = module_text(report, "shop", (), ())
    assert "        with self.assertRaises(ValueError):\n            price(1)\n" in text


def test_every_synthetic_issue_with_a_case_is_understood() -> None:
    case = Case(("from shop import price",), "price(1)")
    for expected, actual in (("0.0", "1.0"), ("None", "True"), ("'a b'", "'a'")):
        for trouble in (Outcome(actual), Outcome("", "ValueError: percent")):
            sight = Sight(case, Outcome(expected), trouble, "It gives a price.", "0.1", "shop")
            for style in STYLES.values():
                for seed in range(5):
                    report = read_report(style(sight, random.Random(seed)))
                    assert report is not None
                    assert (report.call, report.wanted) == ("price(1)", expected)


@pytest.mark.parametrize(
    ("issue", "reason"),
    [
        ("shop gives wrong results.", NO_CALL),
        ("`price(1)` is wrong.", NO_VALUE),
        (f"{RUN}It is wrong.", NO_VALUE),
        (f"{RUN}I expected an error, `ShopError: percent`.", NO_ERROR),
        (f"{RUN}I expected `None`.", ""),
    ],
)
def test_what_an_issue_lacks_is_named(issue: str, reason: str) -> None:
    assert missing_in(issue) == reason


@pytest.mark.parametrize(
    "issue",
    [
        "It does not work.",
        f"`{CALL}` is wrong.",
        "```python\nfrom a import b\nb(\n```\nExpected `1`.",
        "`x` expected `1`",
    ],
)
def test_an_issue_without_a_call_and_a_value_has_no_test(issue: str) -> None:
    assert read_report(issue) is None


def test_every_micro_issue_is_understood_and_no_answer_is_needed() -> None:
    for split in ("train", "heldout", "unseen"):
        for number in range(10):
            task, hidden = micro_task(split, number, seed=0)
            report = read_report(task.problem_statement)
            assert report is not None
            calls = write_by_script(task)
            made = [next(calls)]
            if made[0].name == "search":
                path = next(path for path in task.repository.files if path.endswith(".py"))
                made.append(calls.send(f"{path} (1 match)\n1\tdef {report.names[0]}("))
            made += [calls.send("Exit code: 0"), calls.send("Created")]
            text = made[-2].arguments["file_text"]
            assert made[-1].name == "finish"
            assert find_tests(PATH, text, "unittest") == [f"{PATH}::IssueTest::test_issue"]
            for line in hidden.gold_patch.splitlines():
                if line.startswith("+ "):
                    assert line[1:].strip() not in text


def test_the_module_text_holds_examples_and_neighbours() -> None:
    report = read_report(f"`river.py`: `{CALL}` returns `[]`, expected `[25, 29]`.")
    assert report is not None
    text = module_text(report, "river", [["amber_crate", 'Say.\n\n>>> 1 + 1\n2\n"""']], [["other(1)", "'a'"]])
    ast.parse(text)
    names = [test.rpartition("::")[2] for test in find_tests("t.py", text, "unittest")]
    assert names == ["test_issue", "test_documented_0", "test_stays_0"]
    assert "self.assertEqual(other(1), 'a')" in text
