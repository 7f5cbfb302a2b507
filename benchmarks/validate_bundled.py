"""Validation of the bundled task set, and whether it catches tasks that are planted to be bad.

Each task is graded with its gold patch and with no patch, three times each, the last time with its tests in random
order, every time in a fresh sandbox. Three plants on a bundled task must be caught: tests that pass by chance, an F2P
test that always passes, and a test that needs the network. The first run builds the repositories (network). The last
line printed is one JSON object:

    tasks           bundled tasks
    repositories    repositories that they are in
    sound           tasks found sound
    planted_caught  plants that got the right verdict, and for the right reason, of 3
    not_sound       id -> reason
    runs            gold runs and no-op runs of each task
    runtime_s       median seconds of one grading
    wall_s          seconds for everything

Exit code 0 if every task is sound and all 3 plants are caught. `--quick` takes 2 tasks of two small repositories and
2 runs. A validation that was cut off goes on where it stopped if it is given the same `--record FILE`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepswe.cli.progress import TerminalProgress
from deepswe.config import BundledTasks
from deepswe.evaluation.validation import Validation, summarise, validate_target
from deepswe.progress import Progress
from deepswe.tasks.bundled import bundled_task_set
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.task import HiddenTests, Task, TaskSet

RUNS, QUICK_RUNS = 3, 2
QUICK = BundledTasks(repositories=("schema", "tinydb"), limit=2)
PLANT = "tests/test_planted_by_the_benchmark.py"
COINS = tuple(f"{PLANT}::test_coin[{number}]" for number in range(120))
FLAKY = f"""import os

import pytest


@pytest.mark.parametrize("number", range({len(COINS)}))
def test_coin(number):
    assert os.urandom(1)[0] >= 5
"""
"""Each fails in one run of fifty: some do in nearly any run, none in all runs (which would be no flaky test)."""
ALWAYS = "def test_always():\n    assert True\n"
NETWORK = "import urllib.request\n\n\ndef test_fetch():\n    assert urllib.request.urlopen('http://example.org/')\n"


def plant(task: Task, hidden: HiddenTests) -> TaskSet:
    """Three bad tasks out of a good one."""
    rows = {
        "flaky": replace(hidden, files={**hidden.files, PLANT: FLAKY}, pass_to_pass=(*hidden.pass_to_pass, *COINS)),
        "always": replace(hidden, files={**hidden.files, PLANT: ALWAYS}, fail_to_pass=(f"{PLANT}::test_always",)),
        "network": replace(
            hidden,
            files={**hidden.files, PLANT: NETWORK},
            pass_to_pass=(*hidden.pass_to_pass, f"{PLANT}::test_fetch"),
        ),
    }
    tasks = tuple(replace(task, id=f"planted-{name}") for name in rows)
    return TaskSet(tasks, {f"planted-{name}": replace(row, task_id=f"planted-{name}") for name, row in rows.items()})


def caught(validations: Sequence[Validation]) -> int:
    """How many plants got the right verdict for the right reason."""
    found = {row.task_id: row for row in validations}
    flaky, always, network = (found[f"planted-{name}"] for name in ("flaky", "always", "network"))
    return sum(
        (
            flaky.verdict == "flaky" and set(flaky.flaky) <= set(COINS),
            always.verdict == "unsound" and "doing nothing passes" in always.reason,
            network.verdict == "unsound" and "needs the network" in network.reason,
        )
    )


def measure(quick: bool, workers: int, place: Path, record: Path | None, progress: Progress) -> dict[str, Any]:
    """Validate the plants, then the set."""
    begun = time.monotonic()
    runs = QUICK_RUNS if quick else RUNS
    unbuilt: list[str] = []
    tasks = bundled_task_set(
        QUICK if quick else BundledTasks(),
        LayerCache.default(),
        progress,
        on_failure=lambda name, error: unbuilt.append(f"{name}: {error}"),
    )
    first = min(tasks.tasks, key=lambda task: len(tasks.hidden[task.id].tests))
    plants = validate_target(
        "micro",
        plant(first, tasks.hidden[first.id]),
        progress,
        runs=runs,
        workers=workers,
        record=place / "plants.jsonl",
    )
    found = validate_target(
        "bundled", tasks, progress, runs=runs, workers=workers, record=record or place / "runs.jsonl", resume=True
    )
    told = summarise(found)
    return {
        "tasks": len(tasks.tasks),
        "repositories": len({task.repo for task in tasks.tasks}),
        "sound": told["sound"],
        "planted_caught": caught(plants),
        "not_sound": {row.task_id: row.reason for row in found if row.verdict != "sound"},
        "planted": {row.task_id: f"{row.verdict}: {row.reason}" for row in plants},
        "unbuilt": unbuilt,
        "runs": runs,
        "runtime_s": told["runtime_s"],
        "wall_s": round(time.monotonic() - begun, 1),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 tasks of two small repositories, 2 runs")
    parser.add_argument("--workers", type=int, default=0, help="runs at once; 0 takes one a core")
    parser.add_argument("--record", type=Path, help="of the runs; an existing one is continued")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deepswe-validate-") as place, TerminalProgress() as progress:
        figures = measure(asked.quick, asked.workers, Path(place), asked.record, progress)
    print(json.dumps(figures))
    holds = figures["sound"] == figures["tasks"] and figures["planted_caught"] == 3 and not figures["unbuilt"]
    return 0 if holds else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
