"""Test runs on bundled tasks: a fork server per environment against one interpreter start a run.

For each task its hidden tests run on the bug and on the original code, as they do for every bug that is tried while
tasks are made: in a fork of a server that has imported what they import (`WarmBench`), and in a new interpreter
(`Bench`). The two take turns. The start of the fork server counts, with the one run that tells it what to import.
Attempts are graded in another way: each in a sandbox and an interpreter of its own, since nothing that was alive before
a submission may touch its verdict. Prints one JSON object as its last line:

- `ours`, `peer`: seconds of CPU of all runs; `ratio`; `median_ratio`: over the pairs, without starts; `repeats`: pairs
- `equal`: pairs with the same verdict and the same status of every test of the task
- `by_repository`: ratios

Exits 0 only where the ratio over all is at least 1.5 and all pairs are equal. `--quick`: one repository, three tasks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepswe.tasks.bundled import TaskRecipe, build_source, load_catalogue
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.bench import Bench
from deepswe.tasks.synth.warm import WarmBench

WANTED = 1.5
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Pair:
    """Seconds of CPU of the same run in both ways, and whether they came to the same."""

    ours: float
    peer: float
    equal: bool


def run_pair(warm: WarmBench, cold: Bench, task: TaskRecipe) -> Pair:
    """The hidden tests of one task on the code as it stands."""
    before = warm.cpu_s
    forked = warm.run_tests(task.test_files, timeout_s=TIMEOUT_S)
    spent = warm.cpu_s - before
    started = cold.run_tests(task.test_files, timeout_s=TIMEOUT_S)
    same = forked.complete and started.complete and dict(forked.statuses) == dict(started.statuses)
    return Pair(spent, started.cpu_s, same and solved(task, forked.statuses) == solved(task, started.statuses))


def solved(task: TaskRecipe, statuses: Mapping[str, str]) -> bool:
    """Whether all tests that the bug broke pass."""
    return all(statuses.get(test) == "passed" for test in task.fail_to_pass)


def run_repository(name: str, count: int, cache: LayerCache) -> tuple[list[Pair], float]:
    """Some tasks of one repository, each with its bug and without; and the seconds of the server's start."""
    catalogue, pip = load_catalogue(), Pip()
    source = build_source(catalogue.repository(name), cache, pip, catalogue.build_requirements)
    environment = cache.path(source.recipe.distribution.environment_key)
    tasks = [task for task in catalogue.tasks if task.repo == name][:count]
    pairs = []
    with WarmBench(source, environment) as warm, Bench(source, environment) as cold:
        files = sorted({file for task in tasks for file in task.test_files})
        first = warm.run_tests(files, timeout_s=TIMEOUT_S, modules=True, write_bytecode=True)
        warm.preload(first.modules)
        once = warm.cpu_s
        for task in tasks:
            originals = {file: source.text(file) for file in task.mutation.files}
            for broken in (True, False):
                for file, text in originals.items():
                    code = task.mutation.apply(file, text) if broken else text
                    warm.write(file, code)
                    cold.write(file, code)
                pairs.append(run_pair(warm, cold, task))
            print(f"{task.id}: {pairs[-2:]}", file=sys.stderr, flush=True)
    return pairs, once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repository, three tasks")
    parser.add_argument("--tasks", type=int, default=6, help="of each repository")
    arguments = parser.parse_args()
    chosen = ("schema",) if arguments.quick else load_catalogue().names
    cache = LayerCache.default()
    found = {name: run_repository(name, 3 if arguments.quick else arguments.tasks, cache) for name in chosen}
    pairs = [pair for made, _ in found.values() for pair in made]
    ours = sum(pair.ours for pair in pairs) + sum(once for _, once in found.values())
    peer = sum(pair.peer for pair in pairs)
    result: dict[str, Any] = {
        "ours": ours,
        "peer": peer,
        "ratio": peer / ours,
        "median_ratio": statistics.median(pair.peer / pair.ours for pair in pairs),
        "repeats": len(pairs),
        "equal": sum(pair.equal for pair in pairs),
        "start": {name: once for name, (_, once) in found.items()},
        "by_repository": {
            name: sum(pair.peer for pair in made) / sum(pair.ours for pair in made)
            for name, (made, _) in found.items()
            if made
        },
    }
    print(json.dumps(result))
    return 0 if result["ratio"] >= WANTED and result["equal"] == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
