"""A small run directory, written through the real store: what the curves and the report read."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Grade, Graded, Step, TokenSpan, ToolCall, Trajectory, Ungraded

KINDS = ("wrong operator", "off by one", "swapped arguments")
DIFF = """diff --git a/cart.py b/cart.py
index 3f1c0aa..9b2d4e1 100644
--- a/cart.py
+++ b/cart.py
@@ -1,5 +1,5 @@
 def total(prices, discount):
     amount = 0
     for price in prices:
-        amount -= price
+        amount += price
     return amount * (1 - discount)
"""
ISSUE = "`total` returns a negative amount.\n\n>>> total([2, 3], 0)\n-5\n\nIt should return 5."


def attempt(task: str, number: int, phase: str, step: int, solved: bool | None, **changes: Any) -> Trajectory:
    """One attempt of two turns. `solved=None` has no verdict."""
    kind = KINDS[int(task.split("-")[-1]) % len(KINDS)]
    grade: Grade = Graded(1.0, {"tests/test_cart.py::test_total": "passed", "tests/test_cart.py::test_empty": "passed"})
    if solved is False:
        statuses = {"tests/test_cart.py::test_empty": "passed", "tests/test_cart.py::test_total": "failed"}
        grade = Graded(0.0, statuses, "1 of 1 tests that should pass now still fails: tests/test_cart.py::test_total")
    if solved is None:
        grade = Ungraded("the sandbox stopped answering after 3 s", "sandbox.exec")
    fields: dict[str, Any] = {
        "task_id": task,
        "attempt": number,
        "phase": phase,
        "step": step,
        "spans": (TokenSpan(tuple(range(40)), False), TokenSpan((5, 6, 7), True, (-0.1, -0.2, -0.3), step)),
        "steps": (
            Step(
                "<function=execute_bash>\n<parameter=cmd>cat cart.py</parameter>\n</function>",
                ToolCall("execute_bash", {"cmd": "cat cart.py"}),
                "exit code 0\ndef total(prices, discount):\n    amount = 0\n    ...",
                generation_s=0.31,
                environment_s=0.02,
            ),
            Step(
                "<function=finish>\n<parameter=command>submit</parameter>\n</function>",
                ToolCall("finish", {"command": "submit"}),
                "",
                generation_s=0.12,
                environment_s=0.01,
            ),
        ),
        "ending": Ending.ERROR if solved is None else Ending.SUBMITTED,
        "grade": grade,
        "artifact": DIFF if solved else "",
        "wall_s": 1.4,
        "tags": {"repo": "micro/cart", "kind": kind, "issue": ISSUE},
    }
    return Trajectory(**(fields | changes))


def write_trajectories(run: Path, trajectories: Iterable[Trajectory]) -> None:
    batches: dict[tuple[str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        batches.setdefault((trajectory.phase, trajectory.step), []).append(trajectory)
    store = TrajectoryStore(run)
    for (phase, step), batch in batches.items():
        segment, _ = store.begin(phase, step, keep=False)
        with segment:
            for trajectory in batch:
                segment.append(trajectory)
            segment.commit()


def write_metrics(run: Path, rows: Iterable[dict[str, Any]]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_row(step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    done = 1 / (1 + math.exp(-8 * (step / steps - 0.4)))
    reward = 0.25 + 0.5 * done + noise.gauss(0, 0.03)
    some = int(12 - 6 * done)
    return {
        "kind": "train", "step": step, "reward_mean": reward, "graded": 128, "solved_some": some,
        "solved_all": int(10 * done), "solved_none": 16 - some - int(10 * done), "length_mean": 310 - 40 * done,
        "sampled_mean": 80 - 30 * done, "steps_mean": 3.5 - done, "retries": 0,
        "ending/submitted": 100 + int(20 * done), "ending/max_steps": 24 - int(20 * done), "ending/max_context": 3,
        "ending/generation_timeout": 0, "ending/env_timeout": 1, "ending/error": 0,
        "loss": noise.gauss(0, 0.02), "grad_norm": 0.3 + noise.random() * 0.2, "learning_rate": 1e-3,
        "entropy": 0.6 - 0.3 * done, "ratio": 1.0, "clip_low": 0.002 + noise.random() * 1e-3, "clip_high": 0.003,
        "kl_sampler": abs(noise.gauss(0, 1e-4)), "updates": 1, "tokens": 40_000, "trained_tokens": 9_000,
        "trajectories_total": 128, "trajectories_ungraded": 0, "rollout_s": 6 + noise.random(), "learner_s": 2.0,
        "seconds": 9.0, "time_s": 1.79e9 + 9.0 * step, "grade_runs": 90, "grade_reused": 38,
    }  # fmt: skip


def evaluation_row(name: str, step: int, split: str, mean: float) -> dict[str, Any]:
    return {
        "kind": "evaluation", "step": step, "split": split, "name": name, "pass_at_1": mean,
        "low": mean - 0.06, "high": mean + 0.06, "tasks": 120, "attempts": 480, "endings": {"submitted": 480},
        "grades": {"graded 1": int(480 * mean), "graded 0": 480 - int(480 * mean), "ungraded": 0}, "seconds": 20.0,
    }  # fmt: skip


def write_run(run: Path, *, steps: int = 60, tasks: int = 12, seed: int = 0) -> Path:
    """A finished run that learned."""
    noise = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {"kind": "imitation", "step": step, "time_s": 0.1 * step, "loss": 4 * math.exp(-step / 60) + 0.4}
        for step in range(1, 301)
    ]
    for split, first, last in (("heldout", 0.24, 0.61), ("unseen", 0.11, 0.29)):
        rows.append(evaluation_row("before", 0, split, first))
        rows += [
            evaluation_row("step", step, split, first + (last - first) * step / steps) for step in range(20, steps, 20)
        ]
        rows.append(evaluation_row("after", steps, split, last))
    rows += [train_row(step, steps, noise) for step in range(1, steps + 1)]
    write_metrics(run, rows)
    attempts = []
    for phase, step, share in (("before_heldout", 0, 0.25), ("after_heldout", steps, 0.65), ("train", steps, 0.5)):
        for task in range(tasks):
            for number in range(4):
                solved = noise.random() < share if (task, number) != (3, 1) else None
                attempts.append(attempt(f"cart-{task}", number, phase, step, solved))
    write_trajectories(run, attempts)
    recipe = {
        "version": 1,
        "run": {"name": "quickstart", "seed": 0},
        "tasks": {"kind": "micro", "train": 2000},
        "algorithm": {"advantage": "leave_one_out", "endings": {"submitted": {"train": True, "baseline": True}}},
    }
    (run / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    environment = {"deepswe": "0.1.0", "python": "3.11.7", "cpus": 2, "packages": {"torch": "2.13.0", "numpy": "2.4.6"}}
    (run / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    summary = {
        "pass_at_1_before": 0.24, "pass_at_1_after": 0.61, "difference": 0.37, "ci95": [0.29, 0.45], "tasks": 120,
        "attempts": 480, "endings": {"submitted": 900, "max_steps": 60}, "wall_s": 912.0,
        "grades": {"graded 1": 410, "graded 0": 549, "ungraded": 1},
    }  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run
