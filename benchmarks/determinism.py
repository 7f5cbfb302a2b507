"""Two runs of one recipe and one seed in deterministic mode, in processes of their own: are the metrics the same?

Prints one JSON object as its last line: `identical` (every column that is no measure of the machine, to the last
digit), `rows` (compared), `trajectories` (whether the recorded attempts are the same, token by token) and
`other_seed_differs`.
Exits 0 only where the two are identical and another seed is not. `--quick` takes fewer steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from deepswe.rollout.record import dump_trajectory
from deepswe.rollout.store import TrajectoryStore
from deepswe.training.metrics import read_rows

RECIPE = """
[run]
name = "run"
directory = "{directory}"
deterministic = true
threads = 1
seed = {seed}
[model.scratch]
hidden_size = 32
layers = 2
heads = 2
key_value_heads = 1
intermediate_size = 64
vocabulary = 512
[tasks]
kind = "frozenlake"
train = 200
heldout = 8
max_size = 4
observation = "relational"
[rollout]
tasks_per_step = 4
group_size = 4
max_steps = 4
max_tokens = 200
max_turn_tokens = 3
[algorithm]
kl_coefficient = 0.01
resample_batches = 1
kl_start_every = 2
[algorithm.endings]
max_steps = {{ train = true, baseline = true }}
[imitation]
steps = 4
trajectories = 16
batch_size = 4
[training]
steps = {steps}
learning_rate = 1e-3
updates_per_step = 2
epochs = 2
[evaluation]
attempts = 2
"""

MEASURES_OF_THIS_MACHINE = frozenset({"seconds", "time_s", "rollout_s", "learner_s", "grade_runs", "grade_reused"})


def run(directory: Path, *, steps: int, seed: int) -> Path:
    """Train in a process of its own; the run directory."""
    directory.mkdir(parents=True)
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE.format(directory=directory, steps=steps, seed=seed))
    command = [sys.executable, "-m", "deepswe", "train", str(recipe)]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "PYTHONHASHSEED": "random"})
    return directory / "run"


def numbers(directory: Path) -> list[str]:
    """The rows as text, every digit, without what measures the machine."""
    rows = read_rows(directory / "metrics.jsonl")
    kept = [{key: value for key, value in row.items() if key not in MEASURES_OF_THIS_MACHINE} for row in rows]
    return [json.dumps(row, sort_keys=True) for row in kept]


def attempts(directory: Path) -> list[bytes]:
    """Every recorded attempt, but for its times."""
    return sorted(
        dump_trajectory(
            replace(t, wall_s=0.0, steps=tuple(replace(s, generation_s=0.0, environment_s=0.0) for s in t.steps))
        )
        for t in TrajectoryStore(directory).read()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 steps instead of 20")
    steps = 3 if parser.parse_args().quick else 20
    with tempfile.TemporaryDirectory(prefix="determinism-") as scratch:
        first = run(Path(scratch, "first"), steps=steps, seed=0)
        second = run(Path(scratch, "second"), steps=steps, seed=0)
        other = run(Path(scratch, "other"), steps=steps, seed=1)
        result = {
            "identical": numbers(first) == numbers(second),
            "rows": len(numbers(first)),
            "trajectories": attempts(first) == attempts(second),
            "other_seed_differs": numbers(first) != numbers(other),
        }
    print(json.dumps(result))
    return 0 if result["identical"] and result["trajectories"] and result["other_seed_differs"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
