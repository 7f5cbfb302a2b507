"""Making tasks by mutation: how many of the bugs become tasks, at what price, and against the naive loop?

Five repositories of the bundled set. In each, bugs are put into code that tests run, in an order that the seed fixes;
a bug is valid where 1 to 20 tests fail with it, others still pass, and both runs agree. The price holds everything
after the installation: the coverage run, the mutations, all test runs, the issue texts. The naive loop runs the whole
suite in a new interpreter on the bug and on the original; it is measured in the same run, on a sample of the same
bugs. The last line printed is one JSON object:

    projects            name -> {covered: bugs tried, valid, cpu_s, reasons: why the others are none}
    valid_share         valid of tried, over all projects
    valid_per_cpu_hour  mean over the projects
    naive_ratio         processor time of the naive loop for one bug, over ours; mean over the projects
    naive_agrees        bugs of the sample for which the whole suite fails in exactly the tests that the task names
    naive_sample        bugs of the sample
    covering            most tests that may run a bug's place for it to be tried
    wall_s              seconds for everything

Exit code 0 if valid_share >= 0.70, valid_per_cpu_hour >= 1500 and naive_ratio >= 4, and the sample agrees.
`--quick` takes one project and fewer bugs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from deepswe.cli.progress import TerminalProgress
from deepswe.progress import Progress
from deepswe.tasks.bundled import RepositorySource, TaskRecipe, build_source, is_test_module, load_catalogue
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.bench import Bench
from deepswe.tasks.synth.find import Found, Plan, search
from deepswe.tasks.synth.profile import Profile, install_tools, measure
from deepswe.tasks.synth.warm import WarmBench

PROJECTS = ("toolz", "boltons", "sqlparse", "tabulate", "humanize")
VALID_SHARE, VALID_PER_CPU_HOUR, NAIVE_RATIO = 0.70, 1500.0, 4.0


@dataclass(frozen=True)
class Result:
    """One project."""

    found: Found
    cpu_s: float
    naive_cpu_s: float
    sampled: int
    agreed: int

    @property
    def tried(self) -> int:
        """Bugs that were tried."""
        return sum(self.found.verdicts.values())

    @property
    def valid(self) -> int:
        """Bugs that became tasks."""
        return self.found.verdicts.get("task", 0)


def run_project(name: str, plan: Plan, sample: int, cache: LayerCache, progress: Progress) -> Result:
    """Search one project, then the naive loop on some of the bugs that were kept."""
    catalogue, pip = load_catalogue(), Pip()
    source = build_source(catalogue.repository(name), cache, pip, catalogue.build_requirements)
    tools = install_tools(cache, pip)
    environment = cache.path(source.recipe.distribution.environment_key)
    began = time.process_time()
    with WarmBench(source, environment, tools=tools) as bench:
        progress.begin(f"Tests of {name}", 1)
        profile = measure(bench)
        found = search(bench, profile, plan, progress)
        spent = time.process_time() - began + bench.cpu_s
    agreed, naive_cpu_s = 0, 0.0
    chosen = found.tasks[:sample]
    progress.begin(f"Naive loop in {name}", len(chosen))
    with Bench(source, environment) as cold:
        for task in chosen:
            same, seconds = naive(cold, source, profile, task)
            agreed, naive_cpu_s = agreed + same, naive_cpu_s + seconds
            progress.advance()
    return Result(found, spent, naive_cpu_s, len(chosen), agreed)


def naive(bench: Bench, source: RepositorySource, profile: Profile, task: TaskRecipe) -> tuple[bool, float]:
    """The whole suite on the bug and on the original, each in a new interpreter.

    Returns:
        whether it comes to the same F2P, and processor seconds.
    """
    files = [path for path in source.tests if is_test_module(path)]
    originals = {file: source.text(file) for file in task.mutation.files}
    for file, text in originals.items():
        bench.write(file, task.mutation.apply(file, text))
    broken = bench.run_tests(files, timeout_s=900.0)
    for file, text in originals.items():
        bench.write(file, text)
    intact = bench.run_tests(files, timeout_s=900.0)
    passing = set(profile.passing) & intact.passed
    same = broken.complete and passing - broken.passed == set(task.fail_to_pass)
    return same, broken.cpu_s + intact.cpu_s


def figures(results: dict[str, Result], plan: Plan, wall_s: float) -> dict[str, Any]:
    """What is printed."""
    rates = [3600.0 * item.valid / item.cpu_s for item in results.values()]
    ratios = [
        (item.naive_cpu_s / item.sampled) / (item.cpu_s / item.tried) for item in results.values() if item.sampled
    ]
    return {
        "projects": {
            name: {
                "covered": item.tried,
                "valid": item.valid,
                "cpu_s": round(item.cpu_s, 1),
                "reasons": {reason: n for reason, n in item.found.verdicts.items() if reason != "task"},
            }
            for name, item in results.items()
        },
        "valid_share": round(sum(r.valid for r in results.values()) / sum(r.tried for r in results.values()), 3),
        "valid_per_cpu_hour": round(statistics.mean(rates)),
        "naive_ratio": round(statistics.mean(ratios), 2) if ratios else 0.0,
        "naive_agrees": sum(item.agreed for item in results.values()),
        "naive_sample": sum(item.sampled for item in results.values()),
        "covering": plan.max_covering,
        "wall_s": round(wall_s, 1),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one project, fewer bugs")
    parser.add_argument("--count", type=int, default=60, help="bugs to try in each project")
    parser.add_argument("--sample", type=int, default=3, help="bugs in each project for the naive loop")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    quick = arguments.quick
    plan = Plan(target=10**6, seed=arguments.seed, max_tried=40 if quick else arguments.count, per_function=0)
    began, cache = time.monotonic(), LayerCache.default()
    results: dict[str, Result] = {}
    with TerminalProgress() as progress:
        for name in PROJECTS[:1] if quick else PROJECTS:
            results[name] = run_project(name, plan, 1 if quick else arguments.sample, cache, progress)
    out = figures(results, plan, time.monotonic() - began)
    print(json.dumps(out))
    holds = out["valid_share"] >= VALID_SHARE and out["valid_per_cpu_hour"] >= VALID_PER_CPU_HOUR
    holds = holds and out["naive_ratio"] >= NAIVE_RATIO and out["naive_agrees"] == out["naive_sample"]
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
