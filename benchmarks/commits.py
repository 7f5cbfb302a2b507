"""Commit synthesis on real histories: how many candidates become tasks, and how many an hour of one core.

    benchmarks/commits.py NAME=PATH [NAME=PATH ...]

Each PATH is a clone of a public repository, whose newest commits are searched. The first run builds environments
(network). Nothing of the repositories is kept but figures. The last line printed is one JSON object:

    repositories        name -> {candidates, valid, valid_share, cpu_s, valid_per_cpu_hour, environments, verdicts}
    valid_share         over all candidates
    valid_per_cpu_hour  over all processor seconds, pip's and git's included
    wall_s              seconds for everything

A candidate is a commit that passes the filters, so that its tests are run; valid are those that become tasks. Exit code
0 if each repository has a valid share of at least 0.55 and the whole makes at least 690 an hour.
`--quick` runs 6 candidates of the first repository.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deepswe.cli.progress import TerminalProgress
from deepswe.progress import Progress
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.commits import CommitPlan, Record, search
from deepswe.tasks.synth.commits_history import History

_SET_CHILD_SUBREAPER = 36
LEAST_SHARE, LEAST_RATE = 0.55, 690.0


def adopt_orphans() -> None:
    """Make what our children leave behind ours: bubblewrap ends before the process that did its work is waited for."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def cpu_seconds() -> float:
    """Of this process and of all that it has waited for; orphans are waited for here, when nothing else runs."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(name: str, path: Path, plan: CommitPlan, place: Path, progress: Progress) -> dict[str, Any]:
    """Search one history."""
    begun = cpu_seconds()
    record = Record(place / f"{name}.jsonl", {"repository": name})
    with History(path) as history:
        found = search(history, name, plan, record, LayerCache.default(), progress)
    record.close()
    spent = cpu_seconds() - begun
    return {
        "candidates": found.candidates,
        "valid": len(found.rows),
        "valid_share": round(found.valid_share, 3),
        "cpu_s": round(spent, 1),
        "valid_per_cpu_hour": round(3600.0 * len(found.rows) / spent),
        "environments": len({row.environment.key for row in found.rows}),
        "verdicts": found.verdicts,
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repositories", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--candidates", type=int, default=50, help="of each repository")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="6 candidates of the first repository")
    asked = parser.parse_args()
    plan = CommitPlan(candidates=6 if asked.quick else asked.candidates, workers=asked.workers)
    adopt_orphans()
    begun, rows = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="deepswe-commits-") as place, TerminalProgress() as progress:
        for text in asked.repositories[: 1 if asked.quick else None]:
            name, _, path = text.partition("=")
            rows[name] = measure(name, Path(path), plan, Path(place), progress)
            progress.say(f"{name}: {json.dumps(rows[name])}")
    valid, spent = (sum(row[key] for row in rows.values()) for key in ("valid", "cpu_s"))
    rate = 3600.0 * valid / spent
    figures = {
        "repositories": rows,
        "valid_share": round(valid / max(1, sum(row["candidates"] for row in rows.values())), 3),
        "valid_per_cpu_hour": round(rate),
        "wall_s": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(figures))
    return 0 if rate >= LEAST_RATE and all(row["valid_share"] >= LEAST_SHARE for row in rows.values()) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
