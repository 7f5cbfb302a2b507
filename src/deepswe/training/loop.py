"""The training loop: rollouts, groups, an update, a row of metrics, now and then an evaluation and a checkpoint.

Exact resume: which tasks a step attempts and every seed are pure functions of the recipe and the step, and a step's
trajectories are committed before its update. So after a kill the loop goes back to the last checkpoint and repeats only
updates, on the recorded trajectories; at most the batch in flight is made again. With a `Flow` attempts go on while the
learner trains; which groups a step trained is recorded then, too.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Any, Protocol

from deepswe.algorithms.filters import Selection, select_groups
from deepswe.config import Recipe
from deepswe.envs.base import HasId
from deepswe.errors import ConfigError
from deepswe.progress import Progress
from deepswe.rollout.attempt import derive_seed
from deepswe.rollout.flow import Flow
from deepswe.rollout.flow_groups import FlowPlan
from deepswe.rollout.group import Group, form_groups
from deepswe.rollout.scheduler import Batch, Scheduler, collect_recorded
from deepswe.rollout.store import TrajectoryStore
from deepswe.tasks.difficulty import draw as draw_places
from deepswe.training.health import clip_warning, findings
from deepswe.training.metrics import MetricsLog, Row
from deepswe.types import Ending, Trajectory

PHASE = "train"
HISTORY = 1000
"""Rows that are looked at to tell whether a number is healthy."""

Evaluate = Callable[[str, int], Awaitable[None]]
"""Evaluates the policy as it is: (name, step)."""


SaveCheckpoint = Callable[[int], Awaitable[None]]
"""Saves the learner's state after so many steps, off the event loop."""

Counters = Callable[[], Mapping[str, int]]
"""Running counts of a suite, such as test runs; the loop logs how much each grew in a step."""


Update = Callable[..., Awaitable[dict[str, float]]]
"""Runs the learner's `update` with these arguments, off the event loop."""


class Updatable(Protocol):
    """An engine whose weights follow the learner's."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        """The learner trains inside; an engine that shares its weights samples nothing then."""
        ...

    async def publish(self, version: int) -> Mapping[str, float]:
        """From now on sample from the learner's present weights, which are those of `version`.

        Returns:
            what was measured of it, for the metrics.

        Raises:
            PolicyError: the engine did not take them.
        """
        ...


class Trains(Protocol):
    """A learner, as far as the loop knows it; see `deepswe.training.learner.Learner`."""

    @property
    def version(self) -> int:
        """Updates so far."""
        ...

    def update(self, groups: Sequence[Sequence[Trajectory]], *, measure_start: bool = False) -> dict[str, float]:
        """Train on a batch of groups; a row of numbers, `seconds` among them."""
        ...


def flow_plan(recipe: Recipe) -> FlowPlan:
    """What asynchronous rollouts of a recipe make."""
    rollout = recipe.rollout
    return FlowPlan(
        PHASE,
        recipe.training.steps,
        rollout.tasks_per_step,
        rollout.group_size,
        rollout.temperature,
        recipe.algorithm.endings.retried,
    )


def choose_tasks(
    tasks: Sequence[HasId], *, count: int, step: int, seed: int, weights: Sequence[float] = ()
) -> tuple[HasId, ...]:
    """The tasks of one step: each epoch is a new permutation, cut into whole batches; a pure function of the step.

    Args:
        weights: of the tasks, such as `deepswe.tasks.difficulty.weights` gives; 0 leaves a task out. Where they are not
            all alike there are no epochs: each step draws by them. Empty treats all alike.

    Raises:
        ConfigError: there are fewer tasks than a batch needs.
    """
    able = [place for place in range(len(tasks)) if not weights or weights[place] > 0]
    if count > len(able):
        left = f", of which the sampler leaves {len(able)}" if len(able) < len(tasks) else ""
        raise ConfigError(f"rollout.tasks_per_step is {count}, but there are only {len(tasks)} training tasks{left}")
    if len({weights[place] for place in able} if weights else ()) > 1:
        return tuple(tasks[place] for place in draw_places(weights, count=count, step=step, seed=seed))
    tasks = [tasks[place] for place in able]
    batches = len(tasks) // count
    epoch, position = divmod(step, batches)
    order = list(range(len(tasks)))
    random.Random(derive_seed(seed, "order", epoch)).shuffle(order)
    return tuple(tasks[index] for index in order[position * count : (position + 1) * count])


def choose_more(
    tasks: Sequence[HasId],
    *,
    count: int,
    step: int,
    draw: int,
    seed: int,
    tried: Collection[str],
    weights: Sequence[float] = (),
) -> tuple[HasId, ...]:
    """Further tasks for a step whose groups had no gradient: at most `count`, none that the step tried before.

    Args:
        draw: counted from 1 within the step.
        tried: ids that are not drawn again.
        weights: tasks with weight 0 are not drawn.
    """
    order = [place for place in range(len(tasks)) if not weights or weights[place] > 0]
    random.Random(derive_seed(seed, "more", step, draw)).shuffle(order)
    fresh = (tasks[index] for index in order)
    return tuple(islice((task for task in fresh if task.id not in tried), count))


def fill_batch(groups: Sequence[Group], selections: Sequence[Selection], count: int) -> tuple[Group, ...]:
    """At most `count` whole groups: those with a gradient first, in the order in which they came."""
    ranked = sorted(range(len(groups)), key=lambda index: (not selections[index].informative, index))
    return tuple(groups[index] for index in sorted(ranked[:count]))


class TrainingLoop:
    """Runs the steps of a recipe from wherever the run directory is."""

    def __init__(
        self,
        recipe: Recipe,
        tasks: Sequence[HasId],
        *,
        scheduler: Scheduler,
        learner: Trains,
        engine: Updatable,
        store: TrajectoryStore,
        metrics: MetricsLog,
        progress: Progress,
        counters: Counters,
        evaluate: Evaluate,
        save: SaveCheckpoint,
        weights: Sequence[float] = (),
        flow: Flow | None = None,
        in_thread: Update = asyncio.to_thread,
    ) -> None:
        self._recipe, self._tasks, self._weights = recipe, tasks, weights
        self._flow, self._in_thread = flow, in_thread
        self._background: asyncio.TaskGroup | None = None
        self._scheduler, self._learner, self._engine = scheduler, learner, engine
        self._store, self._metrics, self._progress = store, metrics, progress
        self._counters, self._evaluate, self._save = counters, evaluate, save

    async def run(self, start: int) -> int:
        """Train from step `start` to the end of the recipe or its time limit; returns the number of steps taken."""
        config = self._recipe.training
        if warning := clip_warning(config, self._recipe.algorithm):
            self._progress.say(f"note: {warning}")
        self._progress.begin("training", config.steps)
        self._progress.advance(start)
        if self._flow is None:
            return await self._run_steps(start)
        async with self._flow.running() as self._background:
            return await self._run_steps(start)

    async def _run_steps(self, start: int) -> int:
        config = self._recipe.training
        spent = sum(row["seconds"] for row in self._metrics.find("train") if row["step"] <= start)
        saved = step = start
        # The process before may have been killed between a checkpoint and the evaluation that was due with it; what is
        # recorded of that is only read back.
        await self._evaluate_if_due(step)
        while step < config.steps and not 0 < config.time_limit_s <= spent:
            row = await self._step(step)
            step += 1
            spent += row["seconds"]
            self._progress.advance(1, note=_note(row))
            if step % config.checkpoint_every == 0:
                await self._save(step)
                saved = step
            await self._evaluate_if_due(step)
        if saved != step:
            await self._save(step)
        return step

    async def _evaluate_if_due(self, step: int) -> None:
        every = self._recipe.evaluation.every
        if every and step and step % every == 0 and step < self._recipe.training.steps:
            if self._background is None:
                await self._evaluate("step", step)
            else:  # beside the training, with the weights that come meanwhile
                self._background.create_task(self._evaluation(step))

    async def _evaluation(self, step: int) -> None:
        await self._evaluate("step", step)

    async def _step(self, step: int) -> Row:
        rollout, every = self._recipe.rollout, self._recipe.algorithm.kl_start_every
        begun, counted = _now(), dict(self._counters())
        draws = [await self._flow.batch(step)] if self._flow else await self._sample(step)
        rollout_s = _now() - begun
        groups = tuple(group for draw in draws for group in draw)
        chosen = groups if len(draws) == 1 else fill_batch(groups, self._select(groups), rollout.tasks_per_step)
        async with self._engine.updating():
            # A thread, so that the event loop goes on.
            update = await self._in_thread(
                self._learner.update,
                [group.trajectories for group in chosen],
                measure_start=every > 0 and (step + 1) % every == 0,
            )
            learnt = _now()
            published = await self._engine.publish(self._learner.version)
        row = {
            "kind": "train",
            "step": step + 1,
            **batch_metrics(groups),
            **{name: value for name, value in update.items() if name != "seconds"},
            **{name: value - counted.get(name, 0) for name, value in self._counters().items()},
            "draws": len(draws),
            **published,
            **({**self._flow.row(step, groups), "publish_s": _now() - learnt} if self._flow else {}),
            "rollout_s": rollout_s,
            "learner_s": update["seconds"],
            "seconds": _now() - begun,
            "time_s": time.time(),
        }
        row["warnings"] = self._check(row)
        written = self._metrics.write(row)
        # A row that an earlier process wrote stands, with the seconds that it took then.
        return row if written else self._metrics.find("train", step=step + 1)[0]

    async def _sample(self, step: int) -> list[tuple[Group, ...]]:
        """The groups of a step; further draws where the recipe wants a full batch of groups with a gradient."""
        count, seed = self._recipe.rollout.tasks_per_step, self._recipe.run.seed
        tasks = choose_tasks(self._tasks, count=count, step=step, seed=seed, weights=self._weights)
        draws = [await self._collect(PHASE, step, tasks)]
        tried = {task.id for task in tasks}
        for draw in range(1, self._recipe.algorithm.resample_batches + 1):
            found = sum(selection.informative for groups in draws for selection in self._select(groups))
            more = choose_more(
                self._tasks, count=count, step=step, draw=draw, seed=seed, tried=tried, weights=self._weights
            )
            if found >= count or not more:
                break
            tried |= {task.id for task in more}
            draws.append(await self._collect(f"{PHASE}_more{draw}", step, more))
        return draws

    async def _collect(self, phase: str, step: int, tasks: tuple[HasId, ...]) -> tuple[Group, ...]:
        rollout = self._recipe.rollout
        batch = Batch(
            phase, step, tasks, rollout.group_size, rollout.temperature, self._recipe.algorithm.endings.retried
        )
        return form_groups(
            await collect_recorded(self._scheduler, self._store, batch, keep=not self._recipe.run.deterministic)
        )

    def _select(self, groups: Sequence[Group]) -> tuple[Selection, ...]:
        return select_groups(
            [group.trajectories for group in groups], self._recipe.algorithm, version=self._learner.version
        )

    def _check(self, row: Row) -> list[str]:
        """The names of what is unhealthy; says what was not so at the step before."""
        before = [old for old in self._metrics.find("train") if old["step"] < row["step"]]
        last = before[-1].get("warnings", []) if before else []
        found = findings([*before[-HISTORY:], row])
        for finding in found:
            if finding.name not in last:
                self._progress.say(f"step {row['step']}: {finding.text}")
        return [finding.name for finding in found]


def batch_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """What a batch was like, before any filter.

    Returns:
        reward_mean (over the graded trajectories; 0 where there are none) and graded (how many); solved_all,
        solved_none and solved_some (groups), and "solved/k" (groups with k attempts solved); length_mean and
        sampled_mean (tokens); steps_mean (turns); turn_tokens_mean (sampled tokens a turn); turns (in all); retries;
        and a count "ending/..." for each ending.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    verdicts = [group.rewards for group in groups if group.rewards]
    return {
        "reward_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
        "graded": len(rewards),
        "solved_all": sum(min(rewards) >= 1.0 for rewards in verdicts),
        "solved_none": sum(max(rewards) < 1.0 for rewards in verdicts),
        "solved_some": sum(min(rewards) < 1.0 <= max(rewards) for rewards in verdicts),
        **{f"solved/{solved}": count for solved, count in sorted(_solved(verdicts).items())},
        "length_mean": _mean(trajectories, lambda t: t.length),
        "sampled_mean": _mean(trajectories, lambda t: t.sampled_length),
        "steps_mean": _mean(trajectories, lambda t: len(t.steps)),
        "turn_tokens_mean": sum(t.sampled_length for t in trajectories)
        / max(1, sum(len(t.steps) for t in trajectories)),
        "turns": sum(len(t.steps) for t in trajectories),
        "retries": sum(t.retries for t in trajectories),
        **{f"ending/{ending}": sum(t.ending is ending for t in trajectories) for ending in Ending},
    }


def _solved(verdicts: Sequence[Sequence[float]]) -> Counter[int]:
    return Counter(sum(reward >= 1.0 for reward in rewards) for rewards in verdicts)


def _mean(trajectories: Sequence[Trajectory], value: Callable[[Trajectory], float]) -> float:
    return math.fsum(value(t) for t in trajectories) / len(trajectories)


def _note(row: Row) -> str:
    return f"reward {row['reward_mean']:.2f}  entropy {row['entropy']:.2f}  {row['seconds']:.0f} s/step"


def _now() -> float:
    """The event loop's clock, in seconds: the machine's, or a simulation's."""
    return asyncio.get_running_loop().time()
