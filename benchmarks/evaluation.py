"""Evaluation against an endpoint that fails in every way, killed in the middle and resumed.

A process of its own serves a model that plays the reference solver of micro tasks, half of its plans wrong
(`tests/endpoint_server`). A share of the requests meets a fault on its first try: 429 with Retry-After, 500, silence,
malformed JSON, a reset connection, a stream that is cut, a garbled event; a share of the answers has wrong counts of
tokens. `deepswe eval` makes 500 attempts, 64 in flight, once undisturbed, and once killed by SIGKILL and resumed.
The last line printed is one JSON object:

    attempts               with a verdict, in the killed run
    lost                   planned attempts of the killed run without a verdict
    double                 (task, attempt)s that it recorded twice
    same_table_after_kill  whether both runs give the same table to the last digit
    exact                  whether the tokens of all honestly counted turns are those that the endpoint says it counted
    faults                 kind -> how many there were, in both runs
    wall_s                 seconds of both runs

Exit code 0 if attempts is as planned, lost and double are 0, and both others are true. `--quick` makes 24 attempts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepswe.rollout.frames import count_frames
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Trajectory

ROOT = Path(__file__).parents[1]
RECIPE = """
[run]
name = "{name}"
directory = "{directory}"
[tasks]
kind = "micro"
train = 2
heldout = {tasks}
unseen = 0
[agent]
format = "native"
[sandbox]
concurrency = {concurrency}
memory_mib = 128
[rollout]
start_timeout_s = 1800.0
max_retries = 5
[endpoint]
url = "{url}"
model = "solver"
key_env = "EVALUATION_KEY"
retries = 8
backoff_s = 0.05
idle_s = 5.0
dollars_in = 3.0
dollars_out = 15.0
"""


def begin(recipe: Path, key: str, attempts: int, concurrency: int) -> subprocess.Popen[str]:
    """`deepswe eval`, going on where there is something."""
    command = [str(Path(sys.executable).with_name("deepswe")), "eval", str(recipe), "--policy", "endpoint", "--json"]
    command += ["--attempts", str(attempts), "--concurrency", str(concurrency), "--resume"]
    env = {**os.environ, "EVALUATION_KEY": key}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Its table."""
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"deepswe eval ended with {process.returncode}")
    return json.loads(said.splitlines()[-1])  # type: ignore[no-any-return]


def kill_at(process: subprocess.Popen[str], run: Path, records: int) -> int:
    """SIGKILL as soon as so many attempts are recorded; returns how many there were."""
    while process.poll() is None:
        there = sum(count_frames(part)[0] for part in (run / "trajectories").glob("*.partial.zst"))
        if there >= records:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return there
        time.sleep(0.1)
    raise SystemExit("the evaluation was over before it could be killed")


def count_turns(trajectories: Iterable[Trajectory]) -> tuple[Counter[tuple[str, int]], tuple[int, int, int]]:
    """How often each attempt is recorded with a verdict; prompt and completion of honest turns, and their number."""
    seen: Counter[tuple[str, int]] = Counter()
    honest = []
    for trajectory in trajectories:
        if trajectory.ending is not Ending.ERROR:
            seen[trajectory.task_id, trajectory.attempt] += 1
            honest += [turn for turn in trajectory.usage if not turn.estimated]
    return seen, (sum(t.prompt for t in honest), sum(t.completion for t in honest), len(honest))


def comparable(table: dict[str, Any]) -> dict[str, Any]:
    """What must be the same: everything but the directory."""
    return {key: value for key, value in table.items() if key != "run"}


def main() -> int:
    """Serve, evaluate, kill, resume, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 tasks x 4")
    quick = parser.parse_args().quick
    tasks, attempts, concurrency = (6, 4, 8) if quick else (125, 4, 64)
    command = [sys.executable, "-m", "tests.endpoint_server", "--heldout", str(tasks), "--faults", "0.1"]
    server = subprocess.Popen([*command, "--lies", "0.05"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    begun = time.monotonic()
    try:
        assert server.stdout is not None
        url, key = server.stdout.readline().split()
        with tempfile.TemporaryDirectory(prefix="evaluation-") as directory:
            recipes = {}
            for name in ("whole", "killed"):
                recipes[name] = Path(directory, f"{name}.toml")
                text = RECIPE.format(name=name, directory=directory, tasks=tasks, url=url, concurrency=concurrency)
                recipes[name].write_text(text)
            whole = finish(begin(recipes["whole"], key, attempts, concurrency))
            run = Path(directory, "killed")
            there = kill_at(begin(recipes["killed"], key, attempts, concurrency), run, tasks * attempts * 2 // 5)
            print(f"killed with {there} attempts recorded", file=sys.stderr)
            killed = finish(begin(recipes["killed"], key, attempts, concurrency))
            seen, ours = count_turns(TrajectoryStore(run).read())
        with urllib.request.urlopen(url.removesuffix("/v1") + "/stats") as answer:
            stats = json.load(answer)
    finally:
        server.terminate()
    graded = killed["attempts"]["graded"]
    figures = {
        "attempts": graded,
        "lost": tasks * attempts - len(seen),
        "double": sum(count - 1 for count in seen.values()),
        "same_table_after_kill": comparable(whole) == comparable(killed),
        "exact": ours == (stats["prompt"], stats["completion"], stats["honest"]),
        "pass_at_1": killed["pass_at_1"]["mean"],
        "dollars": killed["used"]["dollars"],
        "faults": stats["faults"],
        "wall_s": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(figures))
    held = graded == tasks * attempts and not figures["lost"] and not figures["double"]
    return 0 if held and figures["same_table_after_kill"] and figures["exact"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
