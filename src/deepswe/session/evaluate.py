"""`deepswe eval`: any policy at the tasks of a split, through the one loop. Needs no torch.

Attempts go to the run's own store. What is there already, under the same hash of all that matters, is not made again,
so that a killed evaluation goes on where it was, and more attempts or tasks add to those that there are.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepswe import __version__
from deepswe.config import Recipe, RolloutConfig
from deepswe.envs.base import HasId
from deepswe.envs.splits import check_split, tasks_of_split
from deepswe.envs.suites import OpenSuite, open_suite
from deepswe.errors import ConfigError, DeepsweError
from deepswe.evaluation.evaluations import config_hash, next_segment, phase_of, read_manifest, recorded, write_entry
from deepswe.evaluation.summary import Row, summarise
from deepswe.policy.base import Policy, Renderer
from deepswe.policy.scripted import ByteRenderer
from deepswe.progress import Progress
from deepswe.rollout.attempt import Attempt
from deepswe.rollout.reference import noop_policy, reference_policy
from deepswe.rollout.scheduler import Batch, Scheduler
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.cassette import Recorder
from deepswe.session.interrupt import run_to_end
from deepswe.training.run import own_run
from deepswe.types import Ending, Trajectory

COUNTLESS = 1 << 40
"""A limit on tokens that no stream of bytes reaches."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of an evaluation is to be made. None of it changes what an attempt does.

    Attributes:
        split: of the task set.
        attempts: at each task.
        limit: at most this many tasks; 0 takes all.
        concurrency: attempts in flight; 0 takes as many as there can be sandboxes.
        max_dollars: once this is spent no attempt is begun any more; 0 is no limit. Those in flight are finished.
        max_wall_s: the same for the seconds of this process.
    """

    split: str
    attempts: int
    limit: int = 0
    concurrency: int = 0
    max_dollars: float = 0.0
    max_wall_s: float = 0.0


@dataclass(slots=True)
class Tally:
    """How an evaluation stands, for those who watch it.

    Attributes:
        planned, known: attempts in all, and those that an earlier process made.
        trajectories: that there are.
        dollars: spent, failed attempts included.
        waiting_for: the last failure of an endpoint, "" after an answer.
        stopped: why no further attempt is begun; "" while it goes on.
    """

    planned: int
    known: int = 0
    trajectories: list[Trajectory] = field(default_factory=list)
    dollars: float = 0.0
    waiting_for: str = ""
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class Listed(Batch):
    """A batch of given attempts, with the seeds that they have."""

    listed: tuple[tuple[HasId, Attempt], ...] = ()

    def plan(self, seed: int) -> tuple[tuple[HasId, Attempt], ...]:
        """Those; the run's seed is not asked."""
        return self.listed


@dataclass(frozen=True, slots=True)
class Stage:
    """What an actor is given: the recipe, the open suite, the batch, the run's directory, the tally, and an ear."""

    recipe: Recipe
    opened: OpenSuite
    batch: Batch
    run: Path
    tally: Tally
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Actor:
    """A way to act.

    Attributes:
        name: for people.
        identity: what makes it this one and no other; part of the hash of the evaluation.
        counts_tokens: the loop's limits on tokens hold for its stream; else it keeps them itself, or has none.
        open: the policy and its renderer, for the length of a block.
        fatal: a failure that every further attempt would meet, too; None while there is none.
        scripted: its turns are a script's, of any length, and no limit on tokens means anything to them.
    """

    name: str
    identity: Mapping[str, Any]
    counts_tokens: bool
    open: Callable[[Stage], AbstractAsyncContextManager[tuple[Policy, Renderer]]]
    fatal: Callable[[], DeepsweError | None] = lambda: None
    scripted: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came of it.

    Attributes:
        run, phase: where.
        table: as of `summarise`.
        spent: dollars, of attempts that do not count (killed, or ended by the infrastructure) as well.
        stopped: why it stopped early; "" if it did not.
    """

    run: Path
    phase: str
    table: Row
    spent: float
    stopped: str


def reference_actor() -> Actor:
    """The suite's own solver, which knows the answers."""

    @asynccontextmanager
    async def act(stage: Stage) -> AsyncIterator[tuple[Policy, Renderer]]:
        renderer = ByteRenderer()
        yield reference_policy(stage.opened.suite, stage.batch, renderer, seed=stage.recipe.run.seed), renderer

    return Actor("reference", {"kind": "reference"}, False, act, scripted=True)


def noop_actor() -> Actor:
    """Submits at once."""

    @asynccontextmanager
    async def act(stage: Stage) -> AsyncIterator[tuple[Policy, Renderer]]:
        renderer = ByteRenderer()
        yield noop_policy(renderer, stage.recipe.agent), renderer

    return Actor("noop", {"kind": "noop"}, False, act, scripted=True)


def run_evaluation(
    recipe: Recipe,
    plan: Plan,
    actor: Actor,
    *,
    resume: bool,
    progress: Progress,
    watch: Callable[[Tally], None] = lambda tally: None,
    tape: Path | None = None,
) -> Evaluation:
    """Evaluate as planned, in the recipe's run directory.

    Args:
        recipe: tasks, agent, limits of an attempt.
        plan: how much.
        actor: who.
        resume: go on in a directory that holds a run; attempts that it has are taken as they are.
        progress: is told how far it is.
        watch: is given the tally after each attempt.
        tape: where a cassette of all new attempts goes; see `deepswe.session.cassette`.

    Raises:
        DeepsweError: also where no attempt at all could be made.
    """
    check_split(recipe, plan.split)
    with own_run(recipe, resume=resume) as run, _recorder(recipe, plan, actor, tape) as recorder:
        return run_to_end(_evaluate(recipe, plan, actor, run.path, progress, watch, recorder))


@contextmanager
def _recorder(recipe: Recipe, plan: Plan, actor: Actor, tape: Path | None) -> Iterator[Recorder | None]:
    """What records, if that is asked for."""
    if tape is None:
        yield None
        return
    if tape.exists():
        raise ConfigError(f"{tape} exists; a cassette is recorded once, give another name")
    header = {
        "deepswe": __version__,
        "recipe": recipe.model_dump(mode="json"),
        "policy": {"name": actor.name, **actor.identity},
        "split": plan.split,
        "temperature": recipe.evaluation.temperature,
        "counts_tokens": actor.counts_tokens,
    }
    with Recorder(tape, header) as recorder:
        yield recorder


def within_limits(recipe: Recipe, *, counts_tokens: bool, scripted: bool = False) -> RolloutConfig:
    """The limits of an attempt, those on tokens lifted where the loop's stream has no tokens of a model.

    The limit of a turn stays for an endpoint, which is asked for no more. A script is not cut at all.
    """
    lifted = () if counts_tokens else ("max_tokens", "max_turn_tokens") if scripted else ("max_tokens",)
    return recipe.rollout.model_copy(update=dict.fromkeys(lifted, COUNTLESS))


async def _evaluate(
    recipe: Recipe,
    plan: Plan,
    actor: Actor,
    run: Path,
    progress: Progress,
    watch: Callable[[Tally], None],
    recorder: Recorder | None,
) -> Evaluation:
    phase = phase_of(plan.split, config_hash(recipe, actor.identity))
    async with open_suite(recipe, progress) as opened:
        tasks = tasks_of_split(opened.suite, plan.split)[: plan.limit or None]
        if recorder is not None:
            opened = replace(opened, suite=recorder.suite(opened.suite))
        batch = Batch(phase, 0, tasks, plan.attempts, recipe.evaluation.temperature)
        tally = Tally(planned=len(tasks) * plan.attempts)
        entry = _entry(recipe, plan, actor)
        write_entry(run, phase, {**read_manifest(run).get(phase, {}), **entry})
        progress.begin(f"{actor.name}: {plan.split}", tally.planned)

        def told() -> None:
            progress.advance()
            watch(tally)

        await _Attempts(Stage(recipe, opened, batch, run, tally, progress.say), plan, actor, told, recorder).make()
    table = summarise(tally.trajectories, planned=tally.planned)
    write_entry(run, phase, {**entry, "table": table, "stopped": tally.stopped})
    return Evaluation(run, phase, table, tally.dollars, tally.stopped)


class _Attempts:
    """Those of one plan: found recorded, or made."""

    def __init__(
        self, stage: Stage, plan: Plan, actor: Actor, told: Callable[[], None], recorder: Recorder | None
    ) -> None:
        self._stage, self._plan, self._actor, self._told, self._recorder = stage, plan, actor, told, recorder
        self._tally, self._batch = stage.tally, stage.batch
        self._wanted = {(attempt.task_id, attempt.attempt) for _, attempt in stage.batch.plan(0)}
        self._begun = time.monotonic()

    async def make(self) -> None:
        """Make what is missing; the tally then holds all of the plan that there is."""
        store, phase = TrajectoryStore(self._stage.run), self._batch.phase
        known = self._take(t for t in recorded(store, phase) if t.ending is not Ending.ERROR)
        if len(known) == len(self._wanted):
            return
        segment, salvaged = store.begin(phase, next_segment(store, phase), keep=True)
        known += self._take(salvaged)

        def record(trajectory: Trajectory) -> None:
            segment.append(trajectory)
            if self._recorder is not None:
                self._recorder.trajectory(trajectory)
            self._tally.trajectories.append(trajectory)
            self._told()

        with segment:
            async with self._actor.open(self._stage) as (policy, renderer):
                scheduler = self._scheduler(policy, renderer)
                await scheduler.collect(self._batch, known=known, record=record, go_on=self._go_on)
            if (fatal := self._actor.fatal()) is not None:
                raise fatal
            segment.commit()

    def _take(self, found: Iterable[Trajectory]) -> list[Trajectory]:
        """Those that are of the plan, into the tally."""
        known = [t for t in found if (t.task_id, t.attempt) in self._wanted]
        self._tally.known += len(known)
        for trajectory in known:
            self._tally.trajectories.append(trajectory)
            self._told()
        return known

    def _go_on(self) -> bool:
        """Whether a further attempt is begun."""
        plan, tally = self._plan, self._tally
        if plan.max_dollars and tally.dollars >= plan.max_dollars:
            tally.stopped = f"the budget of {plan.max_dollars:g} dollars is spent ({tally.dollars:.2f})"
        elif plan.max_wall_s and time.monotonic() - self._begun >= plan.max_wall_s:
            tally.stopped = f"the budget of {plan.max_wall_s:g} seconds is over"
        return not tally.stopped and self._actor.fatal() is None

    def _scheduler(self, policy: Policy, renderer: Renderer) -> Scheduler:
        recipe, capacity = self._stage.recipe, self._stage.opened.capacity
        if self._recorder is not None:
            policy, renderer = self._recorder.policy(policy), self._recorder.renderer(renderer)
        return Scheduler(
            self._stage.opened.suite,
            policy,
            renderer,
            rollout=within_limits(recipe, counts_tokens=self._actor.counts_tokens, scripted=self._actor.scripted),
            agent=recipe.agent,
            concurrency=min(self._plan.concurrency or recipe.rollout.concurrency or capacity, capacity),
            seed=recipe.run.seed,
        )


def _entry(recipe: Recipe, plan: Plan, actor: Actor) -> Row:
    rollout = recipe.rollout
    return {
        "policy": {"name": actor.name, **actor.identity},
        "split": plan.split,
        "attempts": plan.attempts,
        "limit": plan.limit,
        "budget": {
            "steps": rollout.max_steps,
            "tokens": rollout.max_tokens,
            "turn_tokens": rollout.max_turn_tokens,
            "dollars": recipe.endpoint.max_dollars if actor.identity["kind"] == "endpoint" else 0.0,
            "wall_s": rollout.trajectory_timeout_s,
            "generation_s": rollout.generation_timeout_s,
        },
    }
