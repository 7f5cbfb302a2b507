"""Test-time scaling, the whole way: a trained verifier, generated tests, and the choice among 16 candidates.

A policy is trained as `recipes/quickstart.toml` says, with fewer steps of RL (or taken from a run, `--policy`). It
makes K candidates for each held-out task: micro tasks of the recipe, and bundled ones of real repositories, of which it
has seen none. A verifier is trained from the policy's weights on its attempts at training tasks. A script writes tests
from the issues; no hidden test and no solution is looked at. Each candidate is run against these and the repository's
own tests. Then Best@K of each method stands beside Pass@K, over all subsets or a sample.

The last line printed is one JSON object:

    tasks, k            held-out tasks, candidates a task
    bundled             of these, tasks of real repositories: count, pass_at_1 and pass_at_k; tests written for them
    pass_at_1           of one candidate
    pass_at_k           the ceiling: some candidate is right
    ef, eb, hybrid      Best@K of the verifier, of the tests, of both (DeepSWE's rule)
    gain, ci95          hybrid less pass_at_1, with its 95% interval, paired by task
    less_ef, less_eb    hybrid less the other two, each with its interval
    curve               Best@K of every method for K = 1, 2, 4, 8, 16
    verifier, tests     calibration on training groups held out and on the candidates; counts of tests
    wall_s, picture     of this call; the curve as PNG

Exit code 0 where the gain is 10 points or more with an interval above zero, hybrid is not below ef or eb (their
difference's interval reaches zero), and nothing is above the ceiling. Everything is recorded under `--directory`, and
a second call goes on where the first was stopped. `--quick` takes 8 tasks and lets no model act: the candidates are
those of the reference solver with mistakes. Its verifier, from random weights and some 60 examples, knows next to
nothing, and hybrid halves by it; so hybrid is not bound there, and the bounds of the gain are those of `eb`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepswe.analysis.scaling import write_scaling
from deepswe.cli.progress import TerminalProgress
from deepswe.config import Recipe, load_recipe
from deepswe.evaluation.metrics import Difference, paired_difference, pass_at_1
from deepswe.evaluation.selection import TaskCandidates, best_at_k, scaling_curve
from deepswe.progress import Progress
from deepswe.scaling.candidates import Candidate, by_task, load_candidates
from deepswe.scaling.scores import ScoreBook
from deepswe.scaling.select import SELECTORS
from deepswe.scaling.verifier_recipe import load_verifier_recipe
from deepswe.session.rollouts import run_rollouts
from deepswe.session.testing import generate_tests, run_tests
from deepswe.session.train import train_recipe
from deepswe.session.verifier import load_verifier, score_candidates, train_verifier
from deepswe.training.checkpoint import latest

ROOT = Path(__file__).parents[1]
QUICKSTART, VERIFIER = ROOT / "recipes/quickstart.toml", ROOT / "recipes/verifier.toml"
BUNDLED = ROOT / "recipes/bundled.toml"
# What the policy is used to: its prompt, its short turns; room for a real issue and what the tools say.
USED_TO = ("agent.prompt=brief", "rollout.max_steps=4", "rollout.max_turn_tokens=48", "rollout.max_tokens=1024")
SCRATCH = ("hidden_size=64", "layers=2", "heads=2", "key_value_heads=2", "intermediate_size=128", "vocabulary=520")


@dataclass(frozen=True)
class Plan:
    """How much is done."""

    directory: Path
    policy: Path | None
    tasks: int
    bundled: int
    k: int
    quick: bool

    def recipe(self, name: str, *overrides: str) -> Recipe:
        return load_recipe(QUICKSTART, [f"run.directory={self.directory}", f"run.name={name}", *overrides])

    def bundled_recipe(self, name: str, *overrides: str) -> Recipe:
        here = (f"run.directory={self.directory}", f"run.name={name}_bundled", f"tasks.limit={self.bundled}")
        return load_recipe(BUNDLED, [*here, *USED_TO, *overrides])


def train_policy(plan: Plan, progress: Progress) -> Path:
    """The exported weights of the policy."""
    run = plan.policy
    if run is None:
        shorter = ("training.steps=16", "evaluation.splits=['heldout']", "evaluation.attempts=1", "evaluation.tasks=16")
        run = train_recipe(plan.recipe("policy", *shorter), progress=progress)
    checkpoint = latest(run / "checkpoints" / "training")
    if checkpoint is None:
        sys.exit(f"{run} has no checkpoint; give the directory of a finished run of recipes/quickstart.toml")
    return checkpoint.export


def attempt(plan: Plan, recipe: Recipe, split: str, attempts: int, limit: int, progress: Progress) -> Path:
    """A run with attempts in it."""
    actor = "reference" if plan.quick else "model"
    run_rollouts(
        recipe,
        actor=actor,  # type: ignore[arg-type]
        split=split,
        attempts=attempts,
        limit=limit,
        resume=True,
        progress=progress,
    )
    return plan.directory / recipe.run.name


def make_candidates(plan: Plan, progress: Progress) -> tuple[list[Path], list[str], list[Path]]:
    """The runs that hold the candidates, settings of the verifier's model, and the runs that it learns from."""
    if plan.quick:
        guesses = ("imitation.mistakes=0.65", "tasks.train=24", "tasks.heldout=0", "tasks.unseen=0")
        lessons = attempt(plan, plan.recipe("lessons", *guesses, "tasks.seed=1"), "train", 4, 24, progress)
        candidates = attempt(plan, plan.recipe("candidates", *guesses), "train", plan.k, plan.tasks, progress)
        return [candidates], [f"model.scratch.{setting}" for setting in SCRATCH], [lessons]
    export = train_policy(plan, progress)
    model = f"model.path={export}"
    few = ("tasks.train=1", "tasks.unseen=0")  # a larger set holds the same held-out tasks
    runs = [attempt(plan, plan.recipe("candidates", model, *few), "heldout", plan.k, plan.tasks, progress)]
    if plan.bundled:
        runs.append(attempt(plan, plan.bundled_recipe("candidates", model), "train", plan.k, 0, progress))
    if plan.policy is not None:
        return runs, [model], [plan.policy]
    learnt = plan.recipe("lessons", model, "tasks.train=200", "tasks.unseen=0")
    return runs, [model], [plan.directory / "policy", attempt(plan, learnt, "train", 4, 200, progress)]


def score_by_verifier(
    plan: Plan, settings: Sequence[str], runs: Sequence[Path], loaded: Sequence[Candidate], progress: Progress
) -> dict[str, Any]:
    """Train the verifier and let it score."""
    model = ["model.path=", *settings] if plan.quick else list(settings)
    data = [
        f"run.directory={plan.directory}",
        f"data.runs={json.dumps([str(run) for run in runs])}",
        'data.phases=["train", "model_train", "reference_train"]',
        "data.most=2000",
        *(["training.epochs=6", "training.batch_size=8", "training.learning_rate=3e-3"] if plan.quick else []),
    ]
    trained = train_verifier(load_verifier_recipe(VERIFIER, [*model, *data]), resume=True, progress=progress)
    book = ScoreBook.open(plan.directory / "scores.jsonl")
    scored = score_candidates(loaded, load_verifier(Path(trained["verifier"])), book, progress)
    return {"examples": trained["train"], "heldout": trained["calibration"], "candidates": scored["calibration"]}


def score_by_tests(
    plan: Plan, recipe: Recipe, split: str, loaded: Sequence[Candidate], progress: Progress
) -> dict[str, Any]:
    """Write tests and run the candidates against them."""
    out = plan.directory / "tests.jsonl"
    written = generate_tests(
        recipe,
        writer="script",
        split=split,
        attempts=1,
        limit=len(by_task(loaded)),
        out=out,
        resume=True,
        progress=progress,
    )
    ran = run_tests(
        recipe,
        loaded,
        tests=out,
        matrix=plan.directory / "matrix.jsonl",
        scores=ScoreBook.open(plan.directory / "scores.jsonl"),
        workers=0,
        progress=progress,
    )
    kept = ("with_tests", "generated", "regression", "dropped", "ungraded")
    return {
        **{name: written[name] for name in kept},
        "patches": ran["runs"] + ran["known"],
        "unscored": ran["unscored"],
    }


def outcomes(loaded: Sequence[Candidate]) -> dict[str, list[bool]]:
    """Task -> which of its candidates are right."""
    return {task: [bool(c.outcome) for c in group if c.outcome is not None] for task, group in by_task(loaded).items()}


def choose(plan: Plan, loaded: Sequence[Candidate]) -> tuple[dict[str, Any], bool]:
    """The figures, and whether they hold."""
    book = ScoreBook.open(plan.directory / "scores.jsonl")
    tasks = [
        TaskCandidates(task, book.scores(group), {c.name: c.outcome for c in group if c.outcome is not None})
        for task, group in by_task(loaded).items()
    ]
    tasks = [task for task in tasks if len(task.outcomes) >= plan.k]
    ks = [k for k in (1, 2, 4, 8, 16) if k <= plan.k]
    points = scaling_curve(tasks, SELECTORS, ks)
    picture = write_scaling(
        points, plan.directory / "scaling.png", title=f"{len(tasks)} tasks, {plan.k} candidates each"
    )
    single = pass_at_1({task.task_id: list(task.outcomes.values()) for task in tasks}).mean
    last = points[-1]
    best = {
        name: {task.task_id: [best_at_k(task, SELECTORS[name], plan.k)] for task in tasks}
        for name in ("verifier", "execution", "hybrid")
    }
    less_ef, less_eb = (paired_difference(best[name], best["hybrid"]) for name in ("verifier", "execution"))
    gain = last.gain["hybrid"]
    figures: dict[str, Any] = {
        "tasks": len(tasks),
        "k": plan.k,
        "pass_at_1": round(single, 4),
        "pass_at_k": round(last.pass_at_k.mean, 4),
        "ef": round(last.best["verifier"].mean, 4),
        "eb": round(last.best["execution"].mean, 4),
        "hybrid": round(last.best["hybrid"].mean, 4),
        "gain": round(gain.mean, 4),
        "ci95": [round(gain.low, 4), round(gain.high, 4)],
        "less_ef": said(less_ef),
        "less_eb": said(less_eb),
        "curve": {
            str(p.k): {"pass": round(p.pass_at_k.mean, 4), **{n: round(e.mean, 4) for n, e in p.best.items()}}
            for p in points
        },
        "picture": str(picture),
    }
    below = not plan.quick and (less_ef.high < 0.0 or less_eb.high < 0.0)
    above = max(estimate.mean for estimate in last.best.values()) > last.pass_at_k.mean + 1e-9
    bound, wanted = (last.gain["execution"], plan.tasks) if plan.quick else (gain, 60 + plan.bundled)
    return figures, bound.mean >= 0.10 and bound.low > 0.0 and not below and not above and len(tasks) >= wanted


def said(difference: Difference) -> list[float]:
    return [round(value, 4) for value in list(asdict(difference).values())[:3]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 tasks, and no model acts")
    parser.add_argument("--policy", type=Path, help="a finished run of recipes/quickstart.toml to take the policy from")
    parser.add_argument("--tasks", type=int, default=64, help="held-out tasks (of at most 120)")
    parser.add_argument("--bundled", type=int, default=12, help="tasks of real repositories besides")
    parser.add_argument("--directory", type=Path, default=Path("runs/test_time_scaling"), help="where it is recorded")
    asked = parser.parse_args()
    directory = asked.directory.with_name(asked.directory.name + "_quick") if asked.quick else asked.directory
    tasks, bundled = (8, 0) if asked.quick else (asked.tasks, asked.bundled)
    plan = Plan(directory, asked.policy, tasks, bundled, 16, asked.quick)
    begun = time.monotonic()
    with TerminalProgress() as progress:
        runs, settings, lessons = make_candidates(plan, progress)
        micro, *real = [load_candidates(run)[0] for run in runs]
        made = ("tasks.train=24", "tasks.heldout=0") if plan.quick else ("tasks.train=1",)
        split = "train" if plan.quick else "heldout"
        tests = score_by_tests(plan, plan.recipe("tests", "tasks.unseen=0", *made), split, micro, progress)
        told: dict[str, Any] = {}
        for found in real:
            counts = score_by_tests(plan, plan.bundled_recipe("tests"), "train", found, progress)
            right = outcomes(found)
            told = {"tasks": len(right), "pass_at_1": round(pass_at_1(right).mean, 4), "tests": counts}
            told["pass_at_k"] = sum(map(any, right.values())) / len(right)
        loaded = [*micro, *(candidate for found in real for candidate in found)]
        verifier = score_by_verifier(plan, settings, lessons, loaded, progress)
        figures, holds = choose(plan, loaded)
    wall_s = round(time.monotonic() - begun, 1)
    print(json.dumps({**figures, "bundled": told, "verifier": verifier, "tests": tests, "wall_s": wall_s}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
