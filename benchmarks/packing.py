"""How many of the tokens that go through the model are useful, packed and sorted, against batches padded as they come.

Lengths are those of 5,120 recorded attempts of a quickstart run (its quantiles stand below), or of the run directory
given with `--run`; and, beside them, heavy-tailed ones up to 36,864 tokens as attempts at real repositories have them.
The peer pads batches of eight in the order in which they come to the longest of each. Prints one JSON object as its
last line:

- `ours`, `peer`: share of useful tokens of the recorded lengths, packed into rows of the budget and padded as they come
- `ratio`: computed tokens of the peer over ours; `repeats`: orders that were tried
- `by_lengths`: the same for each set of lengths, with our padded micro-batches (sorted by length) beside

Exits 0 only where ours is at least 0.9 on the recorded lengths and the heavy-tailed ones make a ratio of at least 2.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepswe.algorithms.packing import padding_share, split_by_tokens
from deepswe.rollout.store import TrajectoryStore

QUANTILES = (
    *(124, 146, 149, 150, 152, 153, 155, 156, 157, 160, 162, 163, 165, 167, 168, 170, 172, 174, 177, 180, 184, 198),
    *(224, 246, 264, 275, 285, 292, 299, 306, 315, 325, 448),
)
"""Of the lengths of 5,120 training attempts of `make quickstart` at commit 2d25337, in steps of 1/32."""
ROWS, STEP = 8, 512


def recorded(count: int, rng: random.Random) -> list[int]:
    """Lengths with these quantiles."""
    places = [rng.random() * (len(QUANTILES) - 1) for _ in range(count)]
    return [
        round(QUANTILES[int(p)] + (p - int(p)) * (QUANTILES[min(int(p) + 1, 32)] - QUANTILES[int(p)])) for p in places
    ]


def heavy_tailed(count: int, rng: random.Random) -> list[int]:
    """Log-normal lengths with a median of 9,000, cut at the limit."""
    return [min(36_864, max(1024, round(rng.lognormvariate(9.1, 0.8)))) for _ in range(count)]


def of_run(path: Path, rng: random.Random) -> list[int]:
    lengths = [t.length for t in TrajectoryStore(path).read("train")]
    return rng.sample(lengths, min(STEP, len(lengths)))


def useful(lengths: Sequence[int], budget: int) -> dict[str, float]:
    """Share of useful tokens: packed into rows, sorted and padded, and padded as they come."""
    total = sum(lengths)
    rows = split_by_tokens(lengths, budget, packed=True)
    as_they_come = [list(range(at, min(at + ROWS, len(lengths)))) for at in range(0, len(lengths), ROWS)]
    # A packed row has no padding; what it leaves of its budget is no work, but a place that a GPU would have filled.
    filled = total / sum(max(budget, sum(lengths[index] for index in row)) for row in rows)
    return {
        "packed": filled,
        "sorted": 1.0 - padding_share(lengths, split_by_tokens(lengths, budget)),
        "peer": 1.0 - padding_share(lengths, as_they_come),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 orders instead of 20")
    parser.add_argument("--run", type=Path, help="a run directory whose training attempts give the recorded lengths")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 20
    found: dict[str, list[dict[str, float]]] = {"recorded": [], "heavy-tailed": []}
    for seed in range(repeats):
        rng = random.Random(seed)
        own = of_run(arguments.run, rng) if arguments.run else recorded(STEP, rng)
        found["recorded"].append(useful(own, 4096))
        found["heavy-tailed"].append(useful(heavy_tailed(STEP, rng), 36_864))
    by_lengths: dict[str, dict[str, Any]] = {}
    for name, rows in found.items():
        shares = {side: statistics.median(row[side] for row in rows) for side in ("packed", "sorted", "peer")}
        by_lengths[name] = {**shares, "ratio": shares["packed"] / shares["peer"]}
    result = {
        "ours": by_lengths["recorded"]["packed"],
        "peer": by_lengths["recorded"]["peer"],
        "ratio": by_lengths["recorded"]["ratio"],
        "repeats": repeats,
        "by_lengths": by_lengths,
    }
    print(json.dumps(result))
    return 0 if result["ours"] >= 0.9 and by_lengths["heavy-tailed"]["ratio"] >= 2.0 else 1


if __name__ == "__main__":
    sys.exit(main())
