"""Validation in real sandboxes: what is planted is caught, and a cut-off validation goes on where it stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from deepswe.config import SandboxConfig
from deepswe.evaluation.validation import RunRecord, Validation, validate, validate_target
from deepswe.grading.tree import Workshop
from deepswe.progress import Silent
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.task import HiddenTests, Measured, Repository, Task, TaskSet
from deepswe.tasks.taskset import load_task_set, save_task_set

BUG = "def add(a, b):\n    return a - b\n"
GOLD = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
HEAD = "import unittest\nfrom calc import add\n\n\nclass T(unittest.TestCase):\n"
F2P = "    def test_sum(self):\n        self.assertEqual(add(2, 3), 5)\n"
ZERO = "    def test_zero(self):\n        self.assertEqual(add(2, 0), 2)\n"
ORDER = (
    "    seen = []\n\n"
    + "".join(f"    def test_part{n}(self):\n        self.seen.append({n})\n\n" for n in range(6))
    + "    def test_whole(self):\n        self.assertEqual(len(self.seen), 6)\n"
)
NETWORK = "    def test_fetch(self):\n        import urllib.request\n\n        urllib.request.urlopen('http://example.org/')\n"
TRUE = "    def test_true(self):\n        pass\n"
ENDLESS = "    def test_endless(self):\n        while add(1, 1) == 2:\n            pass\n"


def make(*rows: tuple[str, str, Sequence[str], Sequence[str]]) -> TaskSet:
    """(id, test methods, F2P, P2P) as a set."""
    tasks, hidden = [], {}
    for name, body, fail_to_pass, pass_to_pass in rows:
        tasks.append(Task(name, "calc", "", Repository(files={"calc.py": BUG}), "test", "train"))
        hidden[name] = HiddenTests(
            name,
            {"test_calc.py": HEAD + body},
            tuple(f"test_calc.py::T::{test}" for test in fail_to_pass),
            tuple(f"test_calc.py::T::{test}" for test in pass_to_pass),
            runner="unittest",
            timeout_s=3.0 if name == "endless" else 60.0,
            gold_patch=GOLD,
        )
    return TaskSet(tuple(tasks), hidden)


PLANTED = make(
    ("sound", F2P + ZERO, ["test_sum"], ["test_zero"]),
    ("flaky", F2P + ORDER, ["test_sum"], [*(f"test_part{n}" for n in range(6)), "test_whole"]),
    ("idle", TRUE, ["test_true"], []),
    ("network", F2P + NETWORK, ["test_sum"], ["test_fetch"]),
    ("endless", F2P + ENDLESS, ["test_sum"], ["test_endless"]),
)


def run(tasks: TaskSet, record: Path, *, resume: bool = False, runs: int = 2) -> tuple[Validation, ...]:
    async def work() -> tuple[Validation, ...]:
        async with SandboxPool(SandboxConfig(), "validate-tests") as pool:
            workshop = Workshop(pool.open, record.parent.joinpath, limits_of(pool.config))
            return await validate(tasks, workshop, book, Silent(), runs=runs, workers=2)

    book = RunRecord(record, resume=resume)
    return asyncio.run(work())


def test_planted_flaky_idle_network_and_endless_tasks_are_caught_and_a_resumed_record_runs_nothing(
    tmp_path: Path,
) -> None:
    record = tmp_path / "record.jsonl"
    found = {row.task_id: row for row in run(PLANTED, record)}
    assert {name: row.verdict for name, row in found.items()} == {
        "sound": "sound",
        "flaky": "flaky",
        "idle": "unsound",
        "network": "unsound",
        "endless": "unsound",
    }
    assert found["flaky"].flaky == ("test_calc.py::T::test_whole",)
    assert found["idle"].reason == "doing nothing passes every test"
    assert "needs the network" in found["network"].reason
    assert found["endless"].reason.startswith("timeout")
    assert found["sound"].runtime_s is not None
    before = record.read_bytes()
    assert before.count(b"\n") == 2 * 2 * 5
    assert run(PLANTED, record, resume=True) == tuple(found.values())
    assert record.read_bytes() == before


@pytest.mark.slow
def test_verdicts_flow_into_the_file_and_a_set_without_its_flaky_tests_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    tasks = PLANTED.only(["sound", "flaky"])
    save_task_set(TaskSet(tasks.tasks, tasks.hidden, {"sound": Measured(attempts=4, solved=1)}), path)

    def again(record: str) -> tuple[Validation, ...]:
        loaded = load_task_set(path)
        return validate_target(
            str(path), loaded, Silent(), runs=2, record=tmp_path / record, cache=LayerCache(tmp_path / "cache")
        )

    again("first.jsonl")
    after = load_task_set(path)
    assert after.measured["flaky"].verdict == "flaky"
    assert after.hidden["flaky"].quarantined == ("test_calc.py::T::test_whole",)
    assert (after.measured["sound"].verdict, after.measured["sound"].attempts) == ("sound", 4)
    assert [row.verdict for row in again("second.jsonl")] == ["sound", "sound"]


def test_task_without_a_gold_patch_has_no_verdict(tmp_path: Path) -> None:
    tasks = make(("sound", F2P, ["test_sum"], []))
    hidden = HiddenTests("sound", tasks.hidden["sound"].files, tasks.hidden["sound"].fail_to_pass, (), "unittest")
    [found] = run(TaskSet(tasks.tasks, {"sound": hidden}), tmp_path / "record")
    assert (found.verdict, found.reason) == ("", "it has no gold patch to validate by")
