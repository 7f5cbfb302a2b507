"""The bundled task set: does the reference solver solve every task, and does doing nothing solve none?

Every attempt goes through the loop of training: a sandbox with the tree, tool calls, one diff, a grade from a fresh
sandbox. The first run builds the repositories (network), later ones need none. The last line printed is one JSON
object:

    tasks           tasks attempted, each once by the reference solver and once by a policy that submits at once
    gold_pass       share that the reference solver solves
    noop_pass       share that doing nothing solves
    repositories    repository -> tasks
    kinds           kind of bug -> tasks
    ungraded        attempts without a verdict
    unbuilt         repositories that could not be built (the warning says why)
    failed_gold     ids of tasks that the reference solver did not solve, with the reason
    cpu_s           processor seconds of one attempt with its grading, all processes in the sandboxes included
    wall_s          seconds for everything

Exit code 0 if gold_pass is 1.0, noop_pass is 0.0, nothing is ungraded and every repository was built.
`--quick` takes 6 tasks of two small repositories.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deepswe.cli.progress import TerminalProgress
from deepswe.config import BundledTasks, Recipe, build_recipe
from deepswe.envs.base import HasId
from deepswe.envs.suites import OpenSuite, open_suite
from deepswe.policy.scripted import ByteRenderer
from deepswe.progress import Progress
from deepswe.rollout.reference import noop_policy, reference_policy
from deepswe.rollout.scheduler import Batch, Scheduler
from deepswe.tasks.bundled import load_catalogue, select_recipes
from deepswe.types import Graded, Trajectory

QUICK = {"repositories": ["schema", "tinydb"], "limit": 6}
SPLITS = ("train", "heldout")


def make_recipe(quick: bool) -> Recipe:
    """The recipe of the benchmark: limits are wide, so that a busy machine changes no verdict."""
    tree = {
        "run": {"name": "bundled"},
        "tasks": {"kind": "bundled", **(QUICK if quick else {})},
        "rollout": {"max_tokens": 4_000_000, "max_turn_tokens": 1_000_000, "max_retries": 2},
    }
    return build_recipe(tree, origin="benchmarks/bundled.py")


async def attempt_all(
    recipe: Recipe, opened: OpenSuite, tasks: Sequence[HasId], noop: bool, progress: Progress
) -> tuple[Trajectory, ...]:
    """One attempt at each task."""
    name = "do nothing" if noop else "reference"
    batch = Batch("noop" if noop else "reference", 0, tuple(tasks), 1, 1.0)
    renderer = ByteRenderer()
    policy = (
        noop_policy(renderer, recipe.agent)
        if noop
        else reference_policy(opened.suite, batch, renderer, seed=recipe.run.seed)
    )
    scheduler = Scheduler(
        opened.suite,
        policy,
        renderer,
        rollout=recipe.rollout,
        agent=recipe.agent,
        concurrency=min(opened.capacity, 8),
        seed=recipe.run.seed,
    )
    progress.begin(f"Bundled tasks, {name}", len(tasks))
    return await scheduler.collect(batch, record=lambda trajectory: progress.advance())


def share_passed(trajectories: Sequence[Trajectory]) -> float:
    """Share of attempts with reward 1; an attempt without a verdict is not one of them."""
    return sum(trajectory.reward == 1.0 for trajectory in trajectories) / len(trajectories)


def words(trajectory: Trajectory) -> str:
    """Why an attempt is not solved."""
    return trajectory.grade.reason if isinstance(trajectory.grade, Graded) else trajectory.grade.error


async def measure(recipe: Recipe, progress: Progress) -> dict[str, Any]:
    """Both policies over the whole set."""
    started = time.monotonic()
    async with open_suite(recipe, progress) as opened:
        tasks = [task for split in SPLITS for task in opened.suite.split(split)]
        before = cpu_seconds()
        gold = await attempt_all(recipe, opened, tasks, False, progress)
        noop = await attempt_all(recipe, opened, tasks, True, progress)
        tags = [opened.suite.describe(task) for task in tasks]
    spent = cpu_seconds() - before
    assert isinstance(recipe.tasks, BundledTasks)
    wanted = {row.repo for row in select_recipes(recipe.tasks, load_catalogue())}
    built = Counter(tag["repo"] for tag in tags)
    return {
        "tasks": len(tasks),
        "gold_pass": share_passed(gold),
        "noop_pass": share_passed(noop),
        "repositories": dict(built),
        "kinds": dict(Counter(tag["kind"] for tag in tags)),
        "ungraded": sum(trajectory.reward is None for trajectory in (*gold, *noop)),
        "unbuilt": sorted(wanted - set(built)),
        "failed_gold": {t.task_id: words(t) for t in gold if t.reward != 1.0},
        "cpu_s": round(spent / (2 * len(tasks)), 2),
        "wall_s": round(time.monotonic() - started, 1),
    }


def cpu_seconds() -> float:
    """Of this process and of all that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 tasks of two small repositories")
    recipe = make_recipe(parser.parse_args().quick)
    with TerminalProgress() as progress:
        figures = asyncio.run(measure(recipe, progress))
    print(json.dumps(figures))
    holds = figures["gold_pass"] == 1.0 and figures["noop_pass"] == 0.0
    return 0 if holds and not figures["ungraded"] and not figures["unbuilt"] else 1


if __name__ == "__main__":
    sys.exit(main())
