from __future__ import annotations

import asyncio
import difflib
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deepswe.errors import SandboxStartError
from deepswe.grading.grade import grade
from deepswe.grading.tree import Workshop
from deepswe.sandbox.base import Sandbox, SandboxSpec
from deepswe.tasks.task import HiddenTests, Repository, Task
from deepswe.types import Grade, Graded, Ungraded

BROKEN = "def double(x):\n    return x + 2\n\n\ndef same(x):\n    return x\n"
FIXED = BROKEN.replace("x + 2", "x * 2")
UNITTEST = """import unittest
from shop import double, same

class A(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(5), 10)
    def test_same(self):
        self.assertEqual(same(5), 5)
"""
PYTEST = """import pytest
from shop import double, same

@pytest.mark.parametrize("x", ["5", "a b", "c::d", "[e]"])
def test_same(x):
    assert same(x) == x

class TestDouble:
    def test_double(self):
        assert double(5) == 10
"""

WRITES_EVERYWHERE = """import os
for number in range(3, 20):
    try: os.write(number, b"x 1 test passed 61 -\\n")
    except OSError: pass
"""


def patch(after: str, path: str = "shop.py", before: str | None = BROKEN) -> str:
    """A unified diff of one file; `before` None makes a new one."""
    old = [] if before is None else before.splitlines(keepends=True)
    name = "/dev/null" if before is None else f"a/{path}"
    head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if before is None else "")
    return head + "".join(difflib.unified_diff(old, after.splitlines(keepends=True), name, f"b/{path}"))


def make(
    tests: str,
    wanted: Mapping[str, str] | tuple[str, ...],
    *,
    runner: str = "unittest",
    files: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
) -> tuple[Task, HiddenTests]:
    """A task with one hidden test file, tests/test_shop.py."""
    environment = "environment" if runner == "pytest" else None
    repository = Repository(files={"shop.py": BROKEN, **(files or {})}, environment=environment)
    ids = tuple(f"tests/test_shop.py::{name}" for name in wanted)
    hidden = HiddenTests(
        "t",
        {"tests/test_shop.py": tests},
        ids[:1],
        ids[1:],
        runner,
        timeout_s=timeout_s,
        gold_patch=patch(FIXED),  # type: ignore[arg-type]
    )
    return Task("t", "r", "issue", repository, "test", "train"), hidden


BOTH = make(UNITTEST, ("A::test_double", "A::test_same"))


def run(workshop: Workshop, diff: str, made: tuple[Task, HiddenTests] = BOTH) -> Grade:
    return asyncio.run(grade(diff, *made, workshop))


def zero(verdict: Grade) -> Graded:
    assert isinstance(verdict, Graded), verdict
    assert verdict.reward == 0
    return verdict


def test_the_gold_patch_passes_and_no_patch_does_not(workshop: Workshop) -> None:
    names = ("tests/test_shop.py::A::test_double", "tests/test_shop.py::A::test_same")
    assert run(workshop, patch(FIXED)) == Graded(1.0, dict.fromkeys(names, "passed"))
    verdict = zero(run(workshop, ""))
    assert verdict.statuses == {names[0]: "failed", names[1]: "passed"}
    assert "AssertionError: 7 != 10" in verdict.reason


def test_a_patch_that_does_not_apply_is_worth_nothing(workshop: Workshop) -> None:
    assert "does not apply" in zero(run(workshop, patch("x\n", before="no such line\n"))).reason
    assert "does not apply" in zero(run(workshop, "not a diff")).reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os\nos._exit(0)\n", "before its report was complete"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("import os\nos.kill(os.getpid(), 9)\n", "before its report was complete"),
        ("import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n", "replaced a part"),
        ("import unittest\nunittest.TestCase.run = lambda *a: None\n", "replaced a part"),
        (WRITES_EVERYWHERE, "something else wrote"),
        ("print('tests/test_shop.py::A::test_double PASSED')\n", "did not pass"),
        ("syntax error", "cannot be imported"),
        ("import os\nif os.fork() == 0:\n    pass\nelse:\n    os._exit(0)\n", "before its report was complete"),
    ],
)
def test_code_under_test_cannot_make_up_a_pass(workshop: Workshop, code: str, reason: str) -> None:
    assert reason in zero(run(workshop, patch(code + BROKEN))).reason


def test_a_patch_cannot_replace_tests_or_what_steers_them(workshop: Workshop) -> None:
    easy = UNITTEST.replace("10", "7")
    cheats = patch(easy, "tests/test_shop.py", None) + patch(
        "import shop\nshop.double = lambda x: 10\n", "conftest.py", None
    )
    assert zero(run(workshop, cheats)).statuses["tests/test_shop.py::A::test_double"] == "failed"
    assert run(workshop, cheats + patch(FIXED)) == run(workshop, patch(FIXED))


def test_modules_of_the_repository_do_not_replace_the_runner_s(workshop: Workshop) -> None:
    shadow = "".join(patch("raise SystemExit(0)\n", f"{name}.py", None) for name in ("unittest", "os", "re"))
    assert zero(run(workshop, shadow)).statuses["tests/test_shop.py::A::test_same"] == "passed"


def test_endless_tests_are_worth_nothing(workshop: Workshop) -> None:
    endless = patch(BROKEN.replace("return x + 2", "while True: pass"))
    made = (BOTH[0], replace(BOTH[1], timeout_s=3.0))
    assert "took more than 3 s" in zero(run(workshop, endless, made)).reason


def test_new_deleted_and_binary_files_of_a_patch_are_applied(workshop: Workshop, tmp_path: Path) -> None:
    tests = (
        "import os, unittest\nclass A(unittest.TestCase):\n    def test_a(self):\n"
        "        self.assertEqual((os.path.exists('shop.py'), open('new.py').read()), (False, 'x = 1\\n'))\n"
        "    def test_b(self):\n        self.assertEqual(open('b.bin', 'rb').read(), bytes(range(3)))\n"
    )
    deleted = (
        "diff --git a/shop.py b/shop.py\ndeleted file mode 100644\n--- a/shop.py\n+++ /dev/null\n@@ -1,6 +0,0 @@\n"
    )
    deleted += "".join(f"-{line}\n" for line in BROKEN.splitlines())
    (tmp_path / "b.bin").write_bytes(bytes(range(3)))
    command = ["git", "diff", "--no-index", "--binary", "/dev/null", "b.bin"]
    binary = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    made = make(tests, ("A::test_a", "A::test_b"))
    assert run(workshop, deleted + patch("x = 1\n", "new.py", None) + binary, made) == Graded(
        1.0, dict.fromkeys(made[1].fail_to_pass + made[1].pass_to_pass, "passed")
    )


FIXTURES = """import unittest

class Parts(unittest.TestCase):
    def test_subtests(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertNotEqual(n, 1)
    def test_skipped(self):
        self.skipTest("why")
    @unittest.expectedFailure
    def test_xfail(self):
        self.fail()
    @unittest.expectedFailure
    def test_xpass(self):
        pass
    def test_error(self):
        raise OSError("x")
    def test_skipped_part(self):
        with self.subTest():
            self.skipTest("why")

class BadSetUp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise OSError("no")
    def test_a(self):
        pass

class BadCleanUp(unittest.TestCase):
    @classmethod
    def tearDownClass(cls):
        raise OSError("no")
    def test_a(self):
        pass
"""


def test_every_status_of_unittest_is_told_apart(workshop: Workshop) -> None:
    expected = {
        "Parts::test_subtests": "failed",
        "Parts::test_skipped": "skipped",
        "Parts::test_xfail": "xfailed",
        "Parts::test_xpass": "xpassed",
        "Parts::test_error": "error",
        "Parts::test_skipped_part": "skipped",
        "Parts::test_nowhere": "missing",
        "Nobody::test_a": "missing",
        "BadSetUp::test_a": "error",
        "BadCleanUp::test_a": "error",
    }
    verdict = zero(run(workshop, "", make(FIXTURES, expected)))
    assert {name.removeprefix("tests/test_shop.py::"): status for name, status in verdict.statuses.items()} == expected


def test_both_runners_give_the_same_ids_and_statuses(workshop: Workshop) -> None:
    wanted = (
        "Parts::test_subtests",
        "Parts::test_skipped",
        "Parts::test_xfail",
        "BadSetUp::test_a",
        "BadCleanUp::test_a",
    )
    first, second = (zero(run(workshop, "", make(FIXTURES, wanted, runner=name))) for name in ("unittest", "pytest"))
    assert {**first.statuses, "tests/test_shop.py::BadSetUp::test_a": "error"} == second.statuses


def test_pytest_ids_with_parameters_are_kept_whole(workshop: Workshop) -> None:
    wanted = ("TestDouble::test_double", *(f"test_same[{name}]" for name in ("5", "a b", "c::d", "[e]")))
    made = make(PYTEST, wanted, runner="pytest")
    assert run(workshop, patch(FIXED), made) == Graded(
        1.0, dict.fromkeys(made[1].fail_to_pass + made[1].pass_to_pass, "passed")
    )
    assert list(zero(run(workshop, "", made)).statuses.values()) == ["failed", *["passed"] * 4]


def test_pytest_cannot_be_steered_by_the_patch(workshop: Workshop) -> None:
    made = make(PYTEST, ("TestDouble::test_double",), runner="pytest", files={"setup.cfg": "[metadata]\nname = x\n"})
    hook = "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    hook += "    out = yield\n    out.get_result().outcome = 'passed'\n"
    cheats = patch(hook, "conftest.py", None) + patch(hook, "tests/conftest.py", None)
    assert zero(run(workshop, cheats, made)).statuses == {made[1].fail_to_pass[0]: "failed"}
    inside = "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"
    assert "replaced a part" in zero(run(workshop, patch(inside + BROKEN), made)).reason
    leaving = patch("import os\nos._exit(0)\n" + BROKEN)
    assert "before its report" in zero(run(workshop, leaving, made)).reason


def test_a_file_that_pytest_cannot_import_is_an_error_of_its_tests(workshop: Workshop) -> None:
    made = make("import nowhere\n" + PYTEST, ("TestDouble::test_double",), runner="pytest")
    assert zero(run(workshop, patch(FIXED), made)).statuses == {made[1].fail_to_pass[0]: "error"}


def test_a_sandbox_that_fails_is_no_verdict(workshop: Workshop) -> None:
    @asynccontextmanager
    async def refuse(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        raise SandboxStartError("no room")
        yield

    verdict = run(replace(workshop, open_sandbox=refuse), patch(FIXED))
    assert verdict == Ungraded("no room", "grading")


def test_a_task_without_its_layer_or_its_tests_is_no_verdict(workshop: Workshop) -> None:
    task, hidden = BOTH
    lacking = replace(task, repository=replace(task.repository, environment="nowhere"))
    assert isinstance(run(workshop, patch(FIXED), (lacking, hidden)), Ungraded)
    assert isinstance(run(workshop, "", (task, replace(hidden, fail_to_pass=(), pass_to_pass=()))), Ungraded)
    without_pytest = (task, replace(hidden, runner="pytest"))
    verdict = run(workshop, "", without_pytest)
    assert isinstance(verdict, Ungraded)
    assert verdict.place == "grading.runner"
