"""Ranking: 20,000 candidates with scores, from a predictions file and a score file to one patch a task.

Runs `deepswe rank` in a process of its own on generated files (1,250 tasks x 16 candidates, patches of 2 kB, 20
generated tests each). The last line printed is one JSON object:

    candidates      how many
    tasks           how many
    wall_s          seconds of the command, start of the interpreter included
    rss_mib         its largest resident memory
    order_free      whether the same records in another order choose the same patches

Exit code 0 if wall_s < 60, rss_mib < 2048 and order_free. `--quick` takes 2,000 candidates.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deepswe.scaling.candidates import Candidate
from deepswe.scaling.scores import ScoreBook

PER_TASK = 16


def make_candidates(tasks: int, rng: random.Random) -> list[Candidate]:
    """Patches of some 2 kB; two in sixteen are the same work."""
    made = []
    for task in range(tasks):
        for number in range(PER_TASK):
            work = min(number, PER_TASK - 2)
            lines = "".join(
                f"-old {i} {task}\n+new {i} {work} {rng.randrange(10) if number < work else 0}\n" for i in range(60)
            )
            patch = f"diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1,60 +1,60 @@\n{lines}"
            made.append(Candidate(f"task-{task:05d}", f"candidate-{number:02d}", patch))
    return made


def write_files(directory: Path, candidates: list[Candidate], rng: random.Random) -> tuple[Path, Path, Path]:
    """The predictions, the same in another order, and the scores."""
    rows = [
        json.dumps({"instance_id": c.task_id, "model_name_or_path": c.name, "model_patch": c.patch}) for c in candidates
    ]
    first, second = directory / "predictions.jsonl", directory / "shuffled.jsonl"
    first.write_text("\n".join(rows))
    rng.shuffle(rows)
    second.write_text("\n".join(rows))
    book = ScoreBook.open(directory / "scores.jsonl")
    for candidate in candidates:
        tests = {f"test_{number}": rng.random() < 0.5 for number in range(20)}
        book.append(candidate, verifier=rng.random(), regression=rng.choice([0.5, 1.0]), reproduction=tests)
    return first, second, book.path


def run(predictions: Path, scores: Path, out: Path) -> tuple[float, str]:
    """Seconds, and what was chosen."""
    command = [str(Path(sys.executable).with_name("deepswe")), "rank", str(predictions), "--scores", str(scores)]
    begun = time.monotonic()
    subprocess.run([*command, "--out", str(out)], check=True, stdout=sys.stderr)
    return time.monotonic() - begun, out.read_text()


def main() -> int:
    """Generate, rank twice, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 candidates")
    tasks = 125 if parser.parse_args().quick else 1250
    rng = random.Random(0)
    candidates = make_candidates(tasks, rng)
    with tempfile.TemporaryDirectory(prefix="ranking-") as name:
        first, second, scores = write_files(Path(name), candidates, rng)
        wall_s, chosen = run(first, scores, Path(name, "out.jsonl"))
        _, again = run(second, scores, Path(name, "again.jsonl"))
    figures = {
        "candidates": len(candidates),
        "tasks": tasks,
        "wall_s": round(wall_s, 1),
        "rss_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10,
        "order_free": chosen == again,
    }
    print(json.dumps(figures))
    return 0 if wall_s < 60 and figures["rss_mib"] < 2048 and figures["order_free"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
