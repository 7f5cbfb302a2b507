"""Kill the trainer five times at random moments, resume, and compare with a run that nobody disturbed.

Prints one JSON object as its last line: `kills, identical, lost, double, leaked`. Exits 0 only where the metrics are
identical to the last digit, no trajectory is lost or counted twice, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from deepswe.rollout.frames import count_frames
from deepswe.rollout.store import TrajectoryStore
from deepswe.sandbox.owner import PREFIX, is_abandoned
from deepswe.training.metrics import read_rows

RECIPE = """
[run]
name = "run"
directory = "{directory}"
deterministic = true
threads = 1
[model.scratch]
hidden_size = 64
layers = 2
heads = 2
key_value_heads = 1
intermediate_size = 128
vocabulary = 600
[tasks]
kind = "micro"
train = 40
heldout = 6
unseen = 0
[agent]
prompt = "brief"
[rollout]
tasks_per_step = {tasks}
group_size = 4
concurrency = 8
max_steps = 4
max_tokens = 640
max_turn_tokens = 64
[imitation]
steps = 30
trajectories = 40
batch_size = 8
learning_rate = 3e-3
[training]
steps = {steps}
learning_rate = 1e-3
checkpoint_every = 3
[evaluation]
attempts = 2
"""

MEASURES_OF_THIS_MACHINE = frozenset({"seconds", "time_s", "rollout_s", "learner_s", "grade_runs", "grade_reused"})
"""Columns that say how long something took, or how much of it this process did itself; all others must be equal."""


def write_recipe(directory: Path, *, steps: int, tasks: int) -> Path:
    directory.mkdir(parents=True)
    path = directory / "recipe.toml"
    path.write_text(RECIPE.format(directory=directory, steps=steps, tasks=tasks))
    return path


def start(recipe: Path, started: set[int]) -> subprocess.Popen[bytes]:
    """Train, and note the process."""
    log = recipe.with_suffix(".log").open("ab")
    command = [sys.executable, "-m", "deepswe", "train", str(recipe), "--resume"]
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONHASHSEED": "random"})
    started.add(process.pid)
    return process


def finish(recipe: Path, process: subprocess.Popen[bytes]) -> None:
    if process.wait(timeout=1800) != 0:
        sys.exit(f"the run of {recipe} failed:\n{recipe.with_suffix('.log').read_text()[-2000:]}")


def recorded(run: Path) -> int:
    """Records in all segments, whole or in flight, plus updates of the imitation: how far a run is."""
    total = 0
    for path in (run / "trajectories").glob("*.zst"):
        with contextlib.suppress(FileNotFoundError):  # it is committed in this moment
            total += count_frames(path)[0]
    metrics = run / "metrics.jsonl"
    return total + (metrics.read_bytes().count(b"\n") if metrics.exists() else 0)


def kill_and_resume(recipe: Path, started: set[int], *, kills: int, total: int, chance: random.Random) -> int:
    """Kill at random moments spread over the run; the number of kills that met a living trainer."""
    run, done = recipe.parent / "run", 0
    process = start(recipe, started)
    for target in sorted(chance.uniform(0.02, 0.95) * total for _ in range(kills)):
        while process.poll() is None and recorded(run) < target:
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 0.5))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            done += process.wait() == -signal.SIGKILL
            process = start(recipe, started)
    finish(recipe, process)
    return done


def comparable_rows(run: Path) -> list[dict[str, object]]:
    rows = [
        {key: value for key, value in row.items() if key not in MEASURES_OF_THIS_MACHINE}
        for row in read_rows(run / "metrics.jsonl")
    ]
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def leaks(started: set[int]) -> list[str]:
    """What these processes left, which are dead: control groups, directories, mounts, processes."""
    marks = tuple(f"{PREFIX}{pid}-" for pid in started)

    def theirs(text: str) -> bool:
        return any(mark in text for mark in marks)

    found = []
    for root, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"cgroup {root}/{name}" for name in names if theirs(name) and is_abandoned(name)]
    base = Path(tempfile.gettempdir()) / f"deepswe-sandboxes-{os.getuid()}"
    if base.exists():
        found += [f"directory {path}" for path in base.iterdir() if theirs(path.name)]
    found += [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if theirs(line)]
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command, parent = status.read_bytes(), (status.parent / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"bwrap" in command.split(b"\0")[0] and parent == "1" and theirs(os.fsdecode(command)):
            found.append(f"process {status.parent.name} {command[:80]!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps and two kills, under a minute")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    size = {"steps": 2, "tasks": 2} if arguments.quick else {"steps": 8, "tasks": 4}
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        calm = write_recipe(Path(scratch, "calm"), **size)
        started: set[int] = set()
        finish(calm, start(calm, started))
        total = recorded(calm.parent / "run")
        killed = write_recipe(Path(scratch, "killed"), **size)
        kills = kill_and_resume(
            killed, started, kills=2 if arguments.quick else 5, total=total, chance=random.Random(arguments.seed)
        )
        wanted = Counter(t.key for t in TrajectoryStore(calm.parent / "run").read())
        got = Counter(t.key for t in TrajectoryStore(killed.parent / "run").read())
        left = leaks(started)
        print("\n".join(left), file=sys.stderr)
        result = {
            "kills": kills,
            "identical": comparable_rows(calm.parent / "run") == comparable_rows(killed.parent / "run"),
            "lost": sum((wanted - got).values()),
            "double": sum((got - wanted).values()),
            "leaked": len(left),
            "trajectories": sum(got.values()),
        }
    print(json.dumps(result))
    sound = result["identical"] and not (result["lost"] or result["double"] or result["leaked"])
    sys.exit(0 if sound and kills == (2 if arguments.quick else 5) else 1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    main()
