"""The classes of turns against labels by hand. The last line printed is one JSON object:

    steps              labelled steps
    agreement          share of them with the same class
    held_out_steps     of these, the ones that the rules were not tuned on
    held_out_agreement their agreement
    by_class           class -> [labelled, of these found]

Exit code 0 if steps is at least 200 and both agreements at least 0.90. `--quick` is the same: it takes a second.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from deepswe.analysis.behaviour import Action, classify
from deepswe.types import Step, ToolCall

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"


def read_pairs(half: str) -> list[tuple[str, str]]:
    """(label, class found) of each step of one half."""
    pairs = []
    for attempt in json.loads((GOLDEN / f"behaviour_{half}.json").read_text(encoding="utf-8")):
        steps = [
            Step(thought, ToolCall(tool, arguments) if tool else None, answer, error)
            for _, thought, tool, arguments, answer, error in attempt["steps"]
        ]
        found = classify(steps)
        pairs += [(row[0], seen.action.value) for row, seen in zip(attempt["steps"], found, strict=True)]
    return pairs


def share(pairs: list[tuple[str, str]]) -> float:
    return sum(label == found for label, found in pairs) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.parse_args()
    tuned, held_out = read_pairs("tuned"), read_pairs("held_out")
    pairs = tuned + held_out
    row = {
        "steps": len(pairs),
        "agreement": round(share(pairs), 4),
        "held_out_steps": len(held_out),
        "held_out_agreement": round(share(held_out), 4),
        "by_class": {
            action.value: [
                sum(label == action for label, _ in pairs),
                sum(label == action == found for label, found in pairs),
            ]
            for action in Action
        },
    }
    print(json.dumps(row))
    good = len(pairs) >= 200 and share(pairs) >= 0.9 and share(held_out) >= 0.9
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
