"""Where the wall time of the quickstart recipe goes: the model, the sandboxes, the learner, and what is ours.

The recipe is run as a user runs it, `deepswe train recipes/quickstart.toml --profile`, its parts shortened alike,
so that the parts keep their shares; the run writes the profile itself. Waiting is the peer's time, computing on the
event loop and whatever else goes on while nobody else is at work is ours. Prints one JSON object as its last line:

- `ours`: share of the wall time that is ours, the median; `peer`: that of the model, the sandboxes and the learner;
  `ratio`: peer over ours; `repeats`: runs
- `model`, `sandbox`, `learner`, `loop`, `alone`: shares; the last two make up ours
- `beside`: of `loop`, the share in which a pass or an update was computed as well; so `ours` less this is the share in
  which nothing but ours was
- `wall_s`: of one run, without the start of Python and its imports

Exits 0 only where `ours` is below 0.05. (Not called profile.py: beside other scripts, that name would hide Python's own
module from them, which torch imports.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
MOST = 0.05
COMMAND = "import sys; from deepswe.cli.main import main; sys.exit(main())"


def shortened(part: int) -> list[str]:
    """Settings that leave one part in so many of the recipe's work."""
    return [
        f"imitation.steps={1200 // part}",
        f"imitation.trajectories={4000 // part}",
        f"tasks.train={4000 // part}",
        f"tasks.heldout={120 // part}",
        f"tasks.unseen={40 // part}",
        f"training.steps={40 // part}",
    ]


def run(directory: Path, name: str, settings: list[str]) -> dict[str, Any]:
    """The profile of one run."""
    settings = [*settings, f"run.name={name}", f"run.directory={directory}"]
    command = [sys.executable, "-c", COMMAND, "train", str(RECIPE), *settings, "--profile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((directory / name / "profile.json").read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the recipe, once")
    parser.add_argument("--part", type=int, help="leave one part in so many of the recipe's work")
    arguments = parser.parse_args()
    part, repeats = arguments.part or (20 if arguments.quick else 10), 1 if arguments.quick else 3
    with tempfile.TemporaryDirectory(prefix="deepswe-profile-") as scratch:
        rows = [run(Path(scratch), f"run{number}", shortened(part)) for number in range(repeats)]

    def share(name: str) -> float:
        return statistics.median(row[f"{name}_s"] / row["wall_s"] for row in rows)

    ours = share("ours")
    row = {
        "ours": round(ours, 4),
        "peer": round(1.0 - ours, 4),
        "ratio": round((1.0 - ours) / ours, 2),
        "repeats": repeats,
        **{name: round(share(name), 4) for name in ("model", "sandbox", "learner", "loop", "alone")},
        "beside": round(statistics.median(row["loop_beside_s"] / row["wall_s"] for row in rows), 4),
        "wall_s": round(statistics.median(row["wall_s"] for row in rows), 1),
        "part": part,
    }
    print(json.dumps(row))
    return 0 if ours < MOST else 1


if __name__ == "__main__":
    sys.exit(main())
