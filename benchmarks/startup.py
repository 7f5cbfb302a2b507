"""How long `deepswe --help` takes, against the interpreter alone and the help of other commands.

Every command is run as a process of its own, in turns, with its modules compiled before. Prints one JSON object as its
last line:

- `ours`, `peer`: milliseconds from start to end, the median, of `deepswe --help` and of `python -c pass`, the least
  that a command in Python can take; `ratio`: peer over ours; `repeats`: of each
- `ours_cpu_ms`, `peer_cpu_ms`: what they computed, user and system, the median
- `commands`: the same for others, where they are installed: the help of one of our commands, of pytest and of TRL

Exits 0 only where `ours` is below 150.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path

LIMIT_MS = 150.0
SCRIPT = "import sys; from deepswe.cli.main import main; sys.exit(main())"
"""What the console script of an installed package does."""


def commands() -> dict[str, list[str]]:
    """Name -> command line, of all that this environment has."""
    scripts = Path(sysconfig.get_path("scripts"))
    found = {
        "deepswe --help": [sys.executable, "-c", SCRIPT, "--help"],
        "python -c pass": [sys.executable, "-c", "pass"],
        "deepswe train --help": [sys.executable, "-c", SCRIPT, "train", "--help"],
    }
    if find_spec("pytest"):
        found["pytest --version"] = [sys.executable, "-m", "pytest", "--version"]
    if (scripts / "trl").exists():
        found["trl --help"] = [str(scripts / "trl"), "--help"]
    return found


def run(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Milliseconds on the clock, and of computing, of one process."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr.decode()[-300:]}")
    return 1000 * wall, 1000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 30, and without TRL")
    quick = parser.parse_args().quick
    repeats = 5 if quick else 30
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    known = commands()
    if quick:
        known.pop("trl --help", None)
    for command in known.values():
        run(command, environment)  # compiles what is not compiled
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in known}
    for number in range(repeats):
        for name, command in known.items():
            if name != "trl --help" or number < 3:  # takes ten seconds
                times[name].append(run(command, environment))
    medians = {
        name: {"ms": statistics.median(wall for wall, _ in rows), "cpu_ms": statistics.median(cpu for _, cpu in rows)}
        for name, rows in times.items()
    }
    ours, peer = medians.pop("deepswe --help"), medians.pop("python -c pass")
    row = {
        "ours": round(ours["ms"], 1),
        "peer": round(peer["ms"], 1),
        "ratio": round(peer["ms"] / ours["ms"], 3),
        "repeats": repeats,
        "ours_cpu_ms": round(ours["cpu_ms"], 1),
        "peer_cpu_ms": round(peer["cpu_ms"], 1),
        "commands": {name: {key: round(value, 1) for key, value in found.items()} for name, found in medians.items()},
    }
    print(json.dumps(row))
    return 0 if ours["ms"] < LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
