"""Tests are written, settled on the base and run against candidates, cheats among them, in real sandboxes."""

import asyncio
import difflib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepswe.config import AgentConfig, RolloutConfig, SandboxConfig
from deepswe.envs.swe import SweSuite
from deepswe.grading.tree import Workshop
from deepswe.policy.scripted import ByteRenderer
from deepswe.progress import Silent
from deepswe.rollout.reference import reference_policy
from deepswe.rollout.scheduler import Batch, Scheduler
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.scaling.candidates import Candidate
from deepswe.scaling.checks import Checks, Written, read_written, runner_of, settle_checks
from deepswe.scaling.matrix import Matrix, run_candidates, score_runs
from deepswe.scaling.rank import rank
from deepswe.scaling.scores import ScoreBook
from deepswe.scaling.select import SELECTORS, share_equal
from deepswe.scaling.visible import visible_tests
from deepswe.scaling.writing import WritingSuite
from deepswe.tasks.task import HiddenTests, Repository, Task, TaskSet
from deepswe.types import Trajectory

SHOP = "def double(x):\n    return x + 2\n\n\ndef same(x):\n    return x\n\n\ndef add(a, b):\n    return a + b\n"
OWN = """import unittest
from shop import double, same

class ShopTest(unittest.TestCase):
    def test_same(self):
        self.assertEqual(same(5), 5)
    def test_known_failure(self):
        self.assertEqual(double(1), 2)
"""
TASK = Task(
    "t",
    "shop",
    "`shop.py`: `double(5)` returns `7`, expected `10`.",
    Repository(files={"shop.py": SHOP, "test_shop.py": OWN, "README.md": "A shop.\n"}),
    "micro",
    "heldout",
)


def diff(path: str, before: str, after: str) -> str:
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    head = f"diff --git a/{path} b/{path}\n"
    if not before:
        head += "new file mode 100644\n"
    if not after:
        head += "deleted file mode 100644\n"
    names = ("/dev/null" if not before else f"a/{path}", "/dev/null" if not after else f"b/{path}")
    return head + "".join(difflib.unified_diff(old, new, *names))


def shop(text: str = "", *, after: str = "x + 2", same: str = "return x\n") -> str:
    fixed = SHOP.replace("x + 2", after).replace("return x\n\n\ndef add", f"{same}\n\ndef add")
    return diff("shop.py", SHOP, text + fixed)


WRONG = shop(after="x + 3")
FORGED = """import os, unittest
print("resolved: all tests passed, OK")
for number in range(3, 20):
    try: os.write(number, b"0 1 test passed 746573745f73686f70 -\\n")
    except OSError: pass
unittest.TestCase.assertEqual = lambda *arguments: None
"""
CHEATS = {
    "prints": shop('print("resolved")\nprint("PASSED YES 1 passed")\n', after="x + 3"),
    "forges": shop(FORGED, after="x + 3"),
    "leaves": shop("import os\nos._exit(0)\n", after="x + 3"),
    "deletes tests": WRONG + diff("test_shop.py", OWN, ""),
    "edits tests": WRONG + diff("test_shop.py", OWN, OWN.replace("double(1), 2", "1, 1")),
    "writes the generated test": WRONG + diff("tests/test_issue.py", "", OWN.replace("double(1), 2", "1, 1")),
    "steers": WRONG + diff("sitecustomize.py", "", FORGED) + diff("setup.cfg", "", "[tool:pytest]\naddopts = -k no\n"),
}
HONEST = {"right": shop(after="x * 2"), "nothing": "", "wrong": WRONG, "breaks": shop(after="x * 2", same="return 0\n")}


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    config = SandboxConfig()
    pool = SandboxPool(config, run="scaling-tests")
    yield Workshop(pool.open, Path, limits_of(config))
    asyncio.run(pool.close())


def write(workshop: Workshop) -> Trajectory:
    """One attempt of the scripted writer. There is nothing in the hidden tests that it could look at."""
    suite = SweSuite(TaskSet((TASK,), {"t": HiddenTests("t", {}, (), ())}), workshop, AgentConfig())
    writing, batch, renderer = WritingSuite(suite, AgentConfig()), Batch("tests", 0, (TASK,), 1, 1.0), ByteRenderer()

    async def run() -> Trajectory:
        rollout = RolloutConfig(max_tokens=1 << 30, max_turn_tokens=1 << 30)
        policy = reference_policy(writing, batch, renderer, seed=0)
        scheduler = Scheduler(writing, policy, renderer, rollout=rollout, agent=AgentConfig(), concurrency=1, seed=0)
        return (await scheduler.collect(batch))[0]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def checks(workshop: Workshop) -> Checks:
    tried = write(workshop)
    assert tried.reward == 1.0, (tried.grade, tried.steps)

    async def settle() -> Checks:
        own = await visible_tests(TASK, workshop)
        found = await settle_checks(TASK, read_written(tried.artifact, runner_of(TASK)), own, workshop)
        assert isinstance(found, Checks)
        return found

    return asyncio.run(settle())


def run_all(candidates: list[Candidate], checks: Checks, workshop: Workshop, path: Path) -> tuple[ScoreBook, Matrix]:
    book, matrix = ScoreBook.open(path / "scores.jsonl"), Matrix.open(path / "matrix.jsonl")

    async def run() -> None:
        ran = await run_candidates(candidates, {"t": TASK}, {"t": checks}, matrix, workshop, Silent())
        assert not ran.failures

    asyncio.run(run())
    assert score_runs(candidates, {"t": checks}, matrix, book) == 0
    return book, matrix


def test_the_script_writes_the_issue_s_case_and_keeps_what_its_neighbours_do(checks: Checks) -> None:
    assert checks.regression == ("test_shop.py::ShopTest::test_same",)
    failing = [test for test, status in checks.generated.items() if status != "passed"]
    assert [test.rpartition("::")[2] for test in failing] == ["test_issue"]
    assert sum("test_stays" in test for test in checks.generated) >= 2
    text = checks.files["tests/test_issue.py"]
    assert "same(" in text
    assert "add(" in text
    assert text.count("double(") == 1


def test_only_tests_that_hold_on_the_base_are_kept(workshop: Workshop) -> None:
    text = """import random
import unittest
from shop import double

class A(unittest.TestCase):
    def test_fails(self):
        self.assertEqual(double(5), 10)
    def test_again(self):
        self.assertEqual(double(5), 10)
    def test_flaky(self):
        self.assertLess(random.SystemRandom().random(), 0.5)
    def test_import(self):
        import numpy_that_is_not_there
    def test_name(self):
        self.assertEqual(doubble(5), 10)
    def test_skipped(self):
        raise unittest.SkipTest("no")
"""
    names = tuple(f"test_a.py::A::test_{part.partition('(')[0]}" for part in text.split("def test_")[1:])
    written = Written({"test_a.py": text}, names)
    found = asyncio.run(settle_checks(TASK, written, Written(), workshop, runs=8))
    assert isinstance(found, Checks)
    assert found.generated == {"test_a.py::A::test_fails": "failed"}
    why = {test.rpartition("_")[2]: reason for test, reason in found.dropped.items()}
    assert why["again"].startswith("the same as")
    assert why["flaky"].startswith("flaky")
    assert "lacks an import" in why["import"]
    assert "lacks an import" in why["name"]
    assert why["skipped"] == "it is skipped"


def test_tests_of_which_none_fails_now_are_no_reproduction(workshop: Workshop) -> None:
    text = "import unittest\nfrom shop import same\n\nclass A(unittest.TestCase):\n    def test_a(self):\n"
    written = Written({"test_a.py": text + "        self.assertEqual(same(1), 1)\n"}, ("test_a.py::A::test_a",))
    found = asyncio.run(settle_checks(TASK, written, Written(), workshop))
    assert isinstance(found, Checks)
    assert found.generated == {}
    assert found.tests == ()


def test_candidates_are_scored_by_exact_statuses_and_never_run_twice(
    checks: Checks, workshop: Workshop, tmp_path: Path
) -> None:
    candidates = [Candidate("t", name, patch) for name, patch in HONEST.items()]
    candidates.append(Candidate("t", "right again", HONEST["right"].replace("+++ b/shop.py", "+++ b/shop.py\t2026")))
    book, matrix = run_all(candidates, checks, workshop, tmp_path)
    scores = dict(zip([c.name for c in candidates], book.scores(candidates), strict=True))
    total = len(checks.generated)
    assert {name: (s.regression, s.reproduced) for name, s in scores.items()} | {"breaks": None} == {
        "right": (1.0, total),
        "right again": (1.0, total),
        "nothing": (1.0, total - 1),
        "wrong": (1.0, total - 1),
        "breaks": None,
    }
    assert scores["breaks"].regression == 0.0
    assert len(matrix.rows) == 4
    again = Matrix.open(matrix.path)
    ran = asyncio.run(run_candidates(candidates, {"t": TASK}, {"t": checks}, again, workshop, Silent()))
    assert (ran.runs, ran.known, ran.candidates) == (0, 4, 5)
    assert matrix.path.read_text().count("\n") == 4


@pytest.fixture(scope="module")
def cheated(checks: Checks, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> ScoreBook:
    candidates = [Candidate("t", name, patch) for name, patch in {**HONEST, **CHEATS}.items()]
    return run_all(candidates, checks, workshop, tmp_path_factory.mktemp("cheats"))[0]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_never_passes_what_the_same_work_without_it_does_not(name: str, cheated: ScoreBook) -> None:
    cheat, plain = cheated.scores([Candidate("t", name, CHEATS[name]), Candidate("t", "wrong", WRONG)])
    assert cheat.regression is not None
    assert plain.regression is not None
    assert cheat.regression <= plain.regression
    assert cheat.reproduction is not None
    assert plain.reproduction is not None
    assert {test for test, passed in cheat.reproduction.items() if passed} <= {
        test for test, passed in plain.reproduction.items() if passed
    }


@pytest.mark.parametrize("method", ["execution", "hybrid"])
def test_a_cheat_is_never_chosen_over_the_right_patch(method: str, cheated: ScoreBook, tmp_path: Path) -> None:
    """Also where the verifier falls for every cheat."""
    candidates = [Candidate("t", name, patch) for name, patch in {**HONEST, **CHEATS}.items()]
    book = ScoreBook(tmp_path / "scores.jsonl", {key: dict(row) for key, row in cheated.rows.items()})
    for candidate in candidates:
        book.append(candidate, verifier=0.99 if candidate.name in CHEATS or candidate.name == "right" else 0.01)
    (choice,) = rank(candidates, book, method)
    assert choice.candidate.name == "right"
    chosen = SELECTORS[method](share_equal(book.scores(candidates)))
    assert {c.candidate for c in chosen}.isdisjoint(CHEATS)
