"""How many of the tokens that go through the model are useful: packed and sorted, against what others pad.

The recorded lengths are those of the attempts of eight of the forty steps of a quickstart run (128 attempts each, as
(prompt, rest): `packing_lengths.json`), or of all steps of the run directory given with `--run`. Beside them,
heavy-tailed ones up to 36,864 tokens, 512 a step, as attempts at real repositories have them. The peers are

- `bare`: batches of eight in the order in which attempts come, each padded to its longest;
- `trl`: GRPOTrainer of TRL 1.16, which pads all prompts of a generation batch (here: of a step) on the left to the
  longest prompt and all completions on the right to the longest completion (`_generate_and_score_completions`), and
  cuts that into micro-batches (`_prepare_inputs`), which `_compute_loss` takes as wide as they are. Where TRL is there
  (the extra `compare`) its own functions make the batches, else the widths come from this rule. The heavy-tailed
  lengths are not told apart into prompts and completions: all counts as completion, so that no prompt is padded, which
  favours TRL.

Prints one JSON object as its last line:

- `ours`, `peer`: share of useful tokens of the recorded lengths, packed into rows of the budget, and of each peer
- `ratio`: tokens that each peer computes over ours, where what a row leaves of its budget counts as computed; `most`:
  the same without that, which no way to batch can exceed
- `trl`: the version whose functions made the batches, "" for the rule; `repeats`: orders that were tried
- `by_lengths`: the same for each set of lengths, with our padded micro-batches (`sorted`, by length) beside

A `ratio` of 2 was wanted on the recorded lengths, too. These are so nearly alike that even TRL's padding wastes less
than half: `most` is below 2, and no packing reaches it. So exits 0 only where ours is at least 0.9 on the recorded
lengths (of each step `ratio` is that share of `most`), and `ratio` at least 2 against both peers on the heavy-tailed
ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepswe.algorithms.packing import padding_share, split_by_tokens
from deepswe.rollout.store import TrajectoryStore

LENGTHS = Path(__file__).with_name("packing_lengths.json")
"""Of `make quickstart` at commit 4717cba: a step a line."""
MICRO, HEAVY = 8, 512
LEAST_USEFUL, LEAST_RATIO = 0.9, 2.0
PEERS = ("bare", "trl")

Attempt = tuple[int, int]
"""Tokens of the prompt, and of all that comes after it."""


def recorded() -> list[list[Attempt]]:
    """The steps of the record."""
    return [[(prompt, rest) for prompt, rest in step] for step in json.loads(LENGTHS.read_text())]


def of_run(path: Path) -> list[list[Attempt]]:
    steps: dict[int, list[Attempt]] = {}
    for trajectory in TrajectoryStore(path).read("train"):
        prompt = len(trajectory.spans[0].tokens)
        steps.setdefault(trajectory.step, []).append((prompt, trajectory.length - prompt))
    return list(steps.values())


def heavy_tailed(rng: random.Random) -> list[Attempt]:
    """Log-normal lengths with a median of 9,000, cut at the limit."""
    return [(0, min(36_864, max(1024, round(rng.lognormvariate(9.1, 0.8))))) for _ in range(HEAVY)]


def trl_version() -> str:
    try:
        return metadata.version("trl")
    except metadata.PackageNotFoundError:
        return ""


def trl_computed(attempts: Sequence[Attempt]) -> int:
    """Tokens of all micro-batches that TRL makes of one generation batch."""
    prompts, rests = ([attempt[part] for attempt in attempts] for part in (0, 1))
    if not trl_version():
        return len(attempts) * (max(prompts) + max(rests))
    from trl.trainer.utils import pad, shuffle_sequence_dict, split_tensor_dict

    sides = {"prompt_ids": ("left", prompts), "completion_ids": ("right", rests)}
    batch = {
        name: pad([torch.zeros(size, dtype=torch.int8) for size in sizes], padding_side=side)
        for name, (side, sizes) in sides.items()
    }
    micros = split_tensor_dict(shuffle_sequence_dict(batch), len(attempts) // MICRO)
    return sum(part.numel() for micro in micros for part in micro.values())


def useful(attempts: Sequence[Attempt], budget: int) -> dict[str, float]:
    """Share of useful tokens: packed into rows, sorted and padded, and those of the peers."""
    lengths = [prompt + rest for prompt, rest in attempts]
    total = sum(lengths)
    rows = split_by_tokens(lengths, budget, packed=True)
    as_they_come = [list(range(at, min(at + MICRO, len(lengths)))) for at in range(0, len(lengths), MICRO)]
    # A packed row has no padding; what it leaves of its budget is no work, but a place that a GPU would have filled.
    filled = total / sum(max(budget, sum(lengths[index] for index in row)) for row in rows)
    return {
        "packed": filled,
        "sorted": 1.0 - padding_share(lengths, split_by_tokens(lengths, budget)),
        "bare": 1.0 - padding_share(lengths, as_they_come),
        "trl": total / trl_computed(attempts),
    }


def summary(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians over the steps and orders, and what follows from them."""
    shares = {side: statistics.median(row[side] for row in rows) for side in rows[0]}
    ratio = {peer: statistics.median(row["packed"] / row[peer] for row in rows) for peer in PEERS}
    return {
        **shares,
        "ratio": ratio,
        "most": {peer: statistics.median(1 / row[peer] for row in rows) for peer in PEERS},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 orders instead of 20")
    parser.add_argument("--run", type=Path, help="a run directory whose training attempts give the recorded lengths")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 20
    steps = of_run(arguments.run) if arguments.run else recorded()
    found: dict[str, list[dict[str, float]]] = {"recorded": [], "heavy-tailed": []}
    for seed in range(repeats):
        rng = random.Random(seed)
        found["recorded"] += [useful(rng.sample(step, len(step)), 4096) for step in steps]
        found["heavy-tailed"].append(useful(heavy_tailed(rng), 36_864))
    by_lengths = {name: summary(rows) for name, rows in found.items()}
    own, heavy = by_lengths["recorded"], by_lengths["heavy-tailed"]
    result = {
        "ours": own["packed"],
        "peer": {peer: own[peer] for peer in PEERS},
        "ratio": own["ratio"],
        "most": own["most"],
        "trl": trl_version(),
        "repeats": repeats,
        "by_lengths": by_lengths,
    }
    print(json.dumps(result))
    return 0 if own["packed"] >= LEAST_USEFUL and min(heavy["ratio"].values()) >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
