import json
from dataclasses import asdict

import pytest

from deepswe.errors import TaskError
from deepswe.grading.report import Report
from deepswe.sandbox.base import ExecResult
from deepswe.scaling.checks import (
    Checks,
    Written,
    believe,
    find_tests,
    join_written,
    load_checks,
    read_written,
    repeated,
)
from deepswe.tasks.task import HiddenTests
from deepswe.types import Graded, Ungraded

MODULE = "import unittest\n\nclass A(unittest.TestCase):\n    def test_a(self):\n        pass\n"


def added(path: str, text: str = MODULE) -> str:
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{text.count(chr(10))} @@\n{lines}"


def test_a_patch_that_adds_test_modules_is_read_whole() -> None:
    written = read_written(added("tests/test_a.py") + added("b_test.py"), "unittest")
    assert written.files == {"tests/test_a.py": MODULE, "b_test.py": MODULE}
    assert written.tests == ("tests/test_a.py::A::test_a", "b_test.py::A::test_a")


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("", "no test in it"),
        (added("tests/test_a.py", "x = 1\n"), "no test in it"),
        (added("shop.py"), "shop.py is no new test module"),
        (added("conftest.py"), "conftest.py is no new test module"),
        (added("test_a.py").replace("new file mode 100644\n", ""), "no new test module"),
        (added("test_a.py") + "diff --git a/b b/b\ndeleted file mode 100644\n", "b is no new test module"),
        (added("test_a.py").replace("100644", "120000"), "no new test module"),
    ],
)
def test_a_patch_that_does_anything_else_is_refused(patch: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_written(patch, "unittest")


def test_functions_are_tests_for_pytest_alone() -> None:
    text = MODULE + "\ndef test_b():\n    pass\n"
    assert find_tests("t.py", text, "unittest") == ["t.py::A::test_a"]
    assert find_tests("t.py", text, "pytest") == ["t.py::A::test_a", "t.py::test_b"]
    assert find_tests("t.py", "def test(:", "pytest") == []


def test_tests_of_several_attempts_keep_files_of_their_own() -> None:
    other = MODULE.replace("pass", "self.fail()")
    parts = [Written({"t.py": text}, ("t.py::A::test_a",)) for text in (MODULE, other, MODULE)]
    joined = join_written(parts)
    assert joined.files == {"t.py": MODULE, "t_2.py": other}
    assert joined.tests == ("t.py::A::test_a", "t_2.py::A::test_a")


def test_the_second_of_two_equal_tests_is_named_whatever_it_is_called() -> None:
    first = "class A:\n    def test_a(self):\n        check(f(1), 2)\n    def test_b(self):\n        check(f( 1 ), 2)\n"
    second = "class B:\n    def test_c(self):\n        check(f(1), 3)\n"
    written = Written({"t.py": first + second}, ("t.py::A::test_a", "t.py::A::test_b", "t.py::B::test_c"))
    assert repeated(written) == {"t.py::A::test_b": "t.py::A::test_a"}


TESTS = HiddenTests("t", {}, ("t::a",), ("t::b",), runner="unittest")
FINE = {"t::a": "passed", "t::b": "failed", "t::s": "failed"}


def result(*, timed_out: bool = False) -> ExecResult:
    return ExecResult(0, b"", b"", timed_out=timed_out)


def report(statuses: dict[str, str], problem: str = "", *, ended: bool = True) -> Report:
    return Report(statuses, {}, started=True, guarded=True, ended=ended, problem=problem)


def test_a_run_in_order_is_believed_test_by_test() -> None:
    found = believe(result(), report(FINE), TESTS, frozenset({"t::s"}))
    assert found == Graded(0.5, {"t::a": "passed", "t::b": "failed"})


@pytest.mark.parametrize(
    ("statuses", "problem", "timed_out"),
    [
        (FINE | {"t::s": "passed"}, "", False),
        ({"t::a": "passed", "t::b": "failed"}, "", False),
        (FINE | {"t::s": "skipped"}, "", False),
        (FINE | {"t::x": "passed"}, "", False),
        (FINE, "the code under test meddled with the run", False),
        (FINE, "", True),
    ],
)
def test_in_a_run_that_is_odd_no_test_counts(statuses: dict[str, str], problem: str, timed_out: bool) -> None:
    found = believe(result(timed_out=timed_out), report(statuses, problem), TESTS, frozenset({"t::s"}))
    assert isinstance(found, Graded)
    assert found.reward == 0.0
    assert set(found.statuses.values()) == {"missing"}
    assert found.reason


def test_a_runner_that_fails_is_no_result() -> None:
    assert isinstance(believe(result(), Report(), TESTS, frozenset()), Ungraded)
    assert isinstance(believe(result(), report(FINE, "cut off", ended=False), TESTS, frozenset()), Ungraded)


def test_checks_survive_a_file_and_their_key_knows_every_test() -> None:
    checks = Checks("t", "unittest", {"t.py": MODULE}, (), {"t.py::A::test_a": "failed"})
    assert load_checks(json.loads(json.dumps(asdict(checks)))) == checks
    other = Checks("t", "unittest", {"t.py": MODULE + "\n"}, (), {"t.py::A::test_a": "failed"})
    assert other.key != checks.key
    assert checks.as_tests().fail_to_pass == ("t.py::A::test_a",)
    for row in ({}, {"task_id": "t"}, {**asdict(checks), "files": {}}):
        with pytest.raises(TaskError, match="no generated tests of a task"):
            load_checks(row)
