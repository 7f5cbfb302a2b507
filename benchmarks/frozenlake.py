"""FrozenLake from random weights: does it learn within five minutes, and does it stay?

For each seed one `deepswe train recipes/frozenlake.toml`, long enough for 500 steps after the threshold, with an
evaluation on held-out maps every 10 steps. The last line printed is one JSON object:

    seeds           the seeds
    success_before  held-out success with random weights
    success_after   held-out success of the first evaluation above 75%, if within 150 steps (else the best one)
    wall_s          seconds from the start of the command to the end of that evaluation (null if there is none)
    stayed_above    the lowest held-out success in the 500 steps after it (null if there is none)

Exit code 0 if for every seed success_before < 0.25, success_after > 0.75, wall_s <= 300 and stayed_above > 0.70.
`--quick` takes one seed, 50 steps at a constant learning rate, and the bounds 0.25, 0.50, 60 and 0.45.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "frozenlake.toml"


@dataclass(frozen=True)
class Plan:
    """What is run and what must hold."""

    seeds: tuple[int, ...]
    reach_steps: int
    stay_steps: int
    every: int
    before: float
    after: float
    stay: float
    wall_s: float
    overrides: tuple[str, ...] = ()


FULL = Plan((0, 1, 2, 3, 4), 150, 500, 10, before=0.25, after=0.75, stay=0.70, wall_s=300.0)
QUICK = Plan(
    *((0,), 40, 10, 10),
    before=0.25,
    after=0.50,
    stay=0.45,
    wall_s=60.0,
    overrides=("training.decay=constant",),
)


Running = list[subprocess.Popen[bytes]]


def run_seed(plan: Plan, seed: int, directory: Path, running: Running) -> dict[str, Any]:
    """One run, which is among `running`, and its figures."""
    started = time.time()
    command = [
        *(str(Path(sys.executable).with_name("deepswe")), "train", str(RECIPE)),
        *(f"run.seed={seed}", f"run.name=seed-{seed}", f"run.directory={directory}"),
        *(f"training.steps={plan.reach_steps + plan.stay_steps}", f"evaluation.every={plan.every}"),
        *plan.overrides,
    ]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        running.append(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    lines = (directory / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "evaluation"]
    before, later = rows[0]["pass_at_1"], rows[1:]
    early = (row for row in later if row["step"] <= plan.reach_steps)
    reached = next((row for row in early if row["pass_at_1"] > plan.after), None)
    if reached is None:
        best = max(row["pass_at_1"] for row in later)
        figures = {"success_before": before, "success_after": best, "wall_s": None, "stayed_above": None}
    else:
        window = range(reached["step"], reached["step"] + plan.stay_steps + 1)
        figures = {
            "success_before": before,
            "success_after": reached["pass_at_1"],
            "wall_s": round(reached["time_s"] - started, 1),
            "stayed_above": min(row["pass_at_1"] for row in later if row["step"] in window),
        }
    print(f"seed {seed}: {figures}", file=sys.stderr, flush=True)
    return figures


def holds(plan: Plan, figures: dict[str, Any]) -> bool:
    """Whether the figures of one seed are within the bounds."""
    return (
        figures["wall_s"] is not None
        and figures["success_before"] < plan.before
        and figures["success_after"] > plan.after
        and figures["wall_s"] <= plan.wall_s
        and figures["stayed_above"] > plan.stay
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, small maps, under 60 seconds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; each of them uses one core")
    parser.add_argument("--seeds", type=int, nargs="+", help="other seeds than 0 to 4")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    seeds = tuple(arguments.seeds or plan.seeds)
    running: Running = []
    with (
        tempfile.TemporaryDirectory(prefix="frozenlake-") as directory,
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        try:
            results = list(pool.map(lambda seed: run_seed(plan, seed, Path(directory), running), seeds))
        except (
            KeyboardInterrupt,
            subprocess.CalledProcessError,
        ):  # an interrupt reaches this thread alone, and the pool waits for the others
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.terminate()
            raise
    keys = ("success_before", "success_after", "wall_s", "stayed_above")
    print(json.dumps({"seeds": list(seeds), **{key: [result[key] for result in results] for key in keys}}))
    return 0 if all(holds(plan, result) for result in results) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
