"""Do the 95% intervals hold what they say? Evaluations are drawn from known populations, and the truth looked for.

Populations of tasks differ in their mean pass rate and in how alike the attempts at one task are. For each, many
evaluations of several sizes are drawn: tasks from the population, attempts from each task's rate. Looked at are the
interval of pass@1 (clustered by task) and that of the paired difference of two evaluations of the same tasks.
The last line printed is one JSON object:

    coverage               share of the intervals of pass@1 that hold the truth, over all populations and sizes
    coverage_difference    the same for paired differences
    coverage_least, coverage_most    of one population and size, pass@1
    cases                  [population, tasks, attempts, coverage of pass@1, coverage of the difference]
    evaluations            drawn in all
    wall_s

Exit code 0 if both coverages lie between 0.93 and 0.97. `--quick` draws a sixth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from random import Random

from deepswe.evaluation.metrics import paired_difference, pass_at_1

POPULATIONS = {"hard": (0.6, 2.4), "even": (2.0, 2.0), "split": (0.3, 0.4), "easy": (3.0, 1.0)}
"""Name -> the two parameters of a beta distribution of pass rates. A small sum makes tasks that are all or nothing."""
SIZES = ((30, 4), (100, 1), (100, 4), (300, 2))
"""Tasks and attempts."""
LIFT = 0.5
"""The second policy moves a rate p to p + LIFT * p * (1 - p)."""


def lifted(rate: float) -> float:
    """The second policy's pass rate of a task."""
    return rate + LIFT * rate * (1.0 - rate)


def truth(alpha: float, beta: float) -> tuple[float, float]:
    """Mean pass rate, and mean lift, of a beta population."""
    mean = alpha / (alpha + beta)
    square = mean * (alpha + 1.0) / (alpha + beta + 1.0)
    return mean, LIFT * (mean - square)


def draw(random: Random, rates: list[float], attempts: int) -> dict[str, list[float]]:
    """Outcomes of one evaluation."""
    return {str(task): [float(random.random() < rate) for _ in range(attempts)] for task, rate in enumerate(rates)}


def cover(random: Random, population: str, tasks: int, attempts: int, draws: int) -> tuple[float, float]:
    """Shares of the intervals that hold the truth."""
    alpha, beta = POPULATIONS[population]
    mean, lift = truth(alpha, beta)
    held = held_difference = 0
    for _ in range(draws):
        rates = [random.betavariate(alpha, beta) for _ in range(tasks)]
        before = draw(random, rates, attempts)
        after = draw(random, [lifted(rate) for rate in rates], attempts)
        estimate, difference = pass_at_1(before), paired_difference(before, after)
        held += estimate.low <= mean <= estimate.high
        held_difference += difference.low <= lift <= difference.high
    return held / draws, held_difference / draws


def main() -> int:
    """Draw, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixth of the evaluations")
    draws = 100 if parser.parse_args().quick else 600
    random, begun = Random(0), time.monotonic()
    cases = []
    for population in POPULATIONS:
        for tasks, attempts in SIZES:
            cases.append([population, tasks, attempts, *cover(random, population, tasks, attempts, draws)])
            print(*cases[-1], file=sys.stderr)
    single, paired = ([float(case[at]) for case in cases] for at in (3, 4))
    figures = {
        "coverage": round(sum(single) / len(single), 4),
        "coverage_difference": round(sum(paired) / len(paired), 4),
        "coverage_least": min(single),
        "coverage_most": max(single),
        "cases": cases,
        "evaluations": draws * len(cases) * 2,
        "wall_s": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(figures))
    return 0 if all(0.93 <= figures[key] <= 0.97 for key in ("coverage", "coverage_difference")) else 1


if __name__ == "__main__":
    sys.exit(main())
