"""`deepswe sweep`: the score of an evaluation under other limits of steps or tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from deepswe.config import Recipe, build_recipe
from deepswe.envs.suites import OpenSuite, open_suite
from deepswe.errors import ConfigError, StoreError
from deepswe.evaluation.evaluations import read_manifest
from deepswe.evaluation.metrics import outcomes_by_task, pass_at_1
from deepswe.evaluation.results import Opened, open_evaluation
from deepswe.evaluation.sweep import Cut, Knob, SweepPoint, cut
from deepswe.policy.base import Completion, Sampling
from deepswe.policy.scripted import ByteRenderer
from deepswe.progress import Progress
from deepswe.regular import read_regular
from deepswe.rollout.attempt import Attempt
from deepswe.rollout.scheduler import Scheduler
from deepswe.session.evaluate import COUNTLESS, Actor, Listed, Plan, run_evaluation
from deepswe.session.interrupt import run_to_end
from deepswe.types import Trajectory

MakeActor = Callable[[Recipe], Actor]


def run_sweep(
    spec: str, knob: Knob, values: Sequence[int], *, rerun: MakeActor | None, progress: Progress
) -> tuple[SweepPoint, ...]:
    """Score an evaluation under each limit.

    Args:
        spec: RUN or RUN:PHASE, made by `deepswe eval`.
        knob: "steps" or "tokens" of an attempt.
        values: the limits.
        rerun: makes the actor that evaluates anew, in a directory of its own, where recorded attempts do not say what
            would have been; None refuses.
        progress: is told how far it is.

    Raises:
        ConfigError: a value needs the model, and `rerun` is None; or the phase was not made by `deepswe eval`.
    """
    found = open_evaluation(spec)
    run = Path(spec.rpartition(":")[0] if not Path(spec).exists() else spec)
    recipe = _recipe_of(run)
    entry = read_manifest(run).get(found.phase)
    if entry is None:
        raise ConfigError(f"{found.phase} of {run} is no evaluation of `deepswe eval`; make one, and sweep that")
    if not any(outcomes_by_task(found.trajectories).values()):
        raise ConfigError(f"no attempt of {found.name} has a verdict; there is nothing to sweep")
    recorded = int(entry["budget"]["steps" if knob == "steps" else "tokens"])
    told = recipe.agent.steps_remaining
    points = []
    for value in values:
        cuts = [cut(t, knob, value, recorded=recorded, told=told) for t in found.trajectories]
        if any(one.kind == "rerun" for one in cuts):
            points.append(_again(recipe, entry, knob, value, cuts, rerun, progress))
        else:
            points.append(run_to_end(_replayed(recipe, found, str(entry["split"]), knob, value, cuts, progress)))
        progress.say(f"{knob} {value}: pass@1 {points[-1].estimate.mean:.3f}")
    return tuple(points)


def _recipe_of(run: Path) -> Recipe:
    path = run / "recipe.json"
    try:
        tree = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read ({error}); without it no attempt can be played again") from error
    return build_recipe(tree, origin=str(path))


def _again(
    recipe: Recipe,
    entry: dict[str, object],
    knob: Knob,
    value: int,
    cuts: Sequence[Cut],
    rerun: MakeActor | None,
    progress: Progress,
) -> SweepPoint:
    """A whole evaluation under that limit."""
    needed = sum(one.kind == "rerun" for one in cuts)
    if rerun is None:
        raise ConfigError(
            f"{needed} of {len(cuts)} attempts do not say what they would have been with {value} {knob}; pass --rerun "
            "to evaluate anew there, or take only smaller limits"
        )
    limit = {"max_steps": value} if knob == "steps" else {"max_tokens": value}
    limit |= {"max_turn_tokens": min(recipe.rollout.max_turn_tokens, limit.get("max_tokens", 1 << 60))}
    changed = recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"name": f"{recipe.run.name}-{knob}-{value}"}),
            "rollout": recipe.rollout.model_copy(update=limit),
        }
    )
    plan = Plan(str(entry["split"]), int(str(entry["attempts"])), int(str(entry["limit"])))
    done = run_evaluation(changed, plan, rerun(changed), resume=True, progress=progress)
    trajectories = open_evaluation(f"{done.run}:{done.phase}").trajectories
    return SweepPoint(knob, value, pass_at_1(outcomes_by_task(trajectories)), 0, 0, len(trajectories), 0)


async def _replayed(
    recipe: Recipe, found: Opened, split: str, knob: Knob, value: int, cuts: Sequence[Cut], progress: Progress
) -> SweepPoint:
    """Kept attempts as they are, cut ones graded where they were cut."""
    pairs = list(zip(found.trajectories, cuts, strict=True))
    kept = [trajectory for trajectory, one in pairs if one.kind == "kept"]
    short = {(t.task_id, t.attempt): (t, one.turns) for t, one in pairs if one.kind == "cut"}
    again: tuple[Trajectory, ...] = ()
    if short:
        progress.begin(f"{knob} {value}: playing again", len(short))
        async with open_suite(recipe, progress) as opened:
            again = await _play(recipe, opened, split, short, lambda trajectory: progress.advance())
    return SweepPoint(
        knob,
        value,
        pass_at_1(outcomes_by_task([*kept, *again])),
        kept=len(kept),
        replayed=len(again),
        rerun=0,
        diverged=sum(_diverged(t, *short[t.task_id, t.attempt]) for t in again),
    )


async def _play(
    recipe: Recipe,
    opened: OpenSuite,
    split: str,
    short: dict[tuple[str, int], tuple[Trajectory, int]],
    done: Callable[[Trajectory], None],
) -> tuple[Trajectory, ...]:
    tasks = {task.id: task for task in opened.suite.split(split)}
    if missing := [task_id for task_id, _ in short if task_id not in tasks]:
        raise ConfigError(f"the recipe of the run no longer makes the task {missing[0]}; it cannot be played again")
    temperature = recipe.evaluation.temperature
    listed = tuple(
        (tasks[task_id], Attempt(task_id, number, "sweep", 0, t.seed, temperature))
        for (task_id, number), (t, _) in sorted(short.items())
    )
    batch = Listed("sweep", 0, (), 0, temperature, listed=listed)
    names = {attempt.name: short[attempt.task_id, attempt.attempt] for _, attempt in batch.plan(0)}
    lifted = {"max_tokens": COUNTLESS, "max_turn_tokens": COUNTLESS, "max_steps": COUNTLESS}
    scheduler = Scheduler(
        opened.suite,
        _Rewound(names),
        ByteRenderer(),
        rollout=recipe.rollout.model_copy(update=lifted),
        agent=recipe.agent,
        concurrency=min(recipe.rollout.concurrency or opened.capacity, opened.capacity),
        seed=recipe.run.seed,
    )
    return await scheduler.collect(batch, record=done)


class _Rewound:
    """Plays the first turns of recorded attempts, and then finds no room for another one."""

    version = 0

    def __init__(self, recorded: Mapping[str, tuple[Trajectory, int]]) -> None:
        self._recorded = recorded
        self._turns: dict[str, Iterator[str]] = {}

    async def generate(
        self, trajectory: str, stream: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> Completion:
        if trajectory not in self._turns:
            whole, turns = self._recorded[trajectory.partition("~")[0]]
            self._turns[trajectory] = iter([step.completion for step in whole.steps[:turns]])
        said = next(self._turns[trajectory], None)
        if said is None:
            return Completion((), (), "context", self.version)
        tokens = ByteRenderer().completion(said)
        return Completion(tokens, (0.0,) * len(tokens), "stop", self.version)

    @asynccontextmanager
    async def cohort(self, names: Sequence[str], *, width: int = 0) -> AsyncIterator[None]:
        yield

    async def release(self, trajectory: str) -> None:
        self._turns.pop(trajectory, None)


def _diverged(replayed: Trajectory, recorded: Trajectory, turns: int) -> bool:
    seen = [step.observation for step in replayed.steps[:turns]]
    return seen != [step.observation for step in recorded.steps[:turns]]
