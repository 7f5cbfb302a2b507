"""A simulated run: the recipe's loop, scheduler, pool and store, with models in place of what is slow."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from deepswe.config import Recipe
from deepswe.errors import ConfigError
from deepswe.progress import Progress, Silent
from deepswe.rollout.flow import Flow
from deepswe.rollout.ledger import Ledger
from deepswe.rollout.scheduler import Scheduler
from deepswe.rollout.store import TrajectoryStore
from deepswe.sandbox.pool import SandboxPool
from deepswe.simulate.clock import run_virtual
from deepswe.simulate.models import (
    Gauge,
    SimulatedBackend,
    SimulatedEngine,
    SimulatedLearner,
    SimulatedSuite,
    SimulatedTask,
    UnitRenderer,
    in_virtual_thread,
    now,
)
from deepswe.simulate.profile import DrawnLives, Lives, Profile
from deepswe.training.loop import TrainingLoop, choose_tasks, flow_plan
from deepswe.training.metrics import MetricsLog

MOST_ATTEMPTS = 100_000
"""In flight at once."""
MOST_STEPS = 100_000
FULL = 0.9
"""A part that is used more than this is the bottleneck."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulated run was like in its middle: without its first quarter, and without the last `max_age` + 1 steps,
    for which no attempts begin any more.

    Attributes:
        steps: that were measured.
        before, after: steps that were simulated before and after them, and count in nothing.
        seconds: virtual, that they took.
        steps_per_hour, attempts_per_hour: of training.
        learner, engine, sandboxes, in_flight: share of the time, of the tokens that the GPUs could sample, of the
            sandboxes and of the places for attempts that were used.
        ages: updates between the sampling of the oldest token of an attempt and its training -> attempts.
        cut, dropped: stragglers among the attempts of the batches, and groups that were never trained.
        bottleneck: which part to have more of.
    """

    steps: int
    before: int
    after: int
    seconds: float
    steps_per_hour: float
    attempts_per_hour: float
    learner: float
    engine: float
    sandboxes: float
    in_flight: float
    ages: dict[int, int]
    cut: int
    dropped: int
    bottleneck: str

    def text(self) -> str:
        """For people, line by line."""
        total = sum(self.ages.values())
        ages = ", ".join(f"{age}: {100 * count / total:.0f}%" for age, count in self.ages.items())
        return "\n".join(
            [
                f"{self.steps_per_hour:.2f} steps/h, {self.attempts_per_hour:.0f} attempts/h "
                f"({self.steps} steps in {self.seconds / 3600:.2g} h; not counted: {self.before} before them to warm up"
                + (f", {self.after} after them that end it)" if self.after else ")"),
                f"used: learner {100 * self.learner:.0f}%, engine {100 * self.engine:.0f}%, sandboxes "
                f"{100 * self.sandboxes:.0f}%, attempts in flight {100 * self.in_flight:.0f}%",
                *([f"age of attempts when they train, in updates: {ages}"] if ages else []),
                f"cut: {self.cut} attempts, dropped: {self.dropped} groups",
                f"bottleneck: {self.bottleneck}",
            ]
        )

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Sums at one moment."""

    at: float
    busy_s: float
    tokens: int
    sandboxes: float
    attempts: float
    ages: Counter[int]


def simulate(
    recipe: Recipe,
    profile: Profile,
    directory: Path,
    *,
    lives: Lives | None = None,
    progress: Progress | None = None,
    start: int = 0,
    on_step: Callable[[int], None] = lambda step: None,
) -> Simulated:
    """Run a recipe in virtual time.

    Args:
        recipe: its rollout, asynchrony, training and sandbox sections count. `sandbox.concurrency` 0 takes
            `rollout.concurrency`, and that the attempts of a step.
        profile: speeds and, without `lives`, all durations.
        directory: gets a store, a ledger and a metrics file; after a kill it is taken up.
        lives: how attempts go.
        progress: is told how far it is.
        start: the step to begin with.
        on_step: called after each step, with their number so far.

    Raises:
        ConfigError: there is no step, or there are more, or more attempts in one, than can be simulated.
        DeepsweError: what would stop or hang the run.
    """
    rollout = recipe.rollout
    attempts = max(rollout.tasks_per_step * rollout.group_size, rollout.concurrency)
    if attempts > MOST_ATTEMPTS:
        raise ConfigError(
            f"{attempts:,} attempts in flight (rollout.tasks_per_step x group_size, or rollout.concurrency) are more "
            f"than can be simulated; lower them to {MOST_ATTEMPTS:,}"
        )
    if not 0 < recipe.training.steps <= MOST_STEPS:
        raise ConfigError(f"training.steps is {recipe.training.steps:,}; from 1 to {MOST_STEPS:,} can be simulated")
    wanted = scaled(recipe, profile.unit)
    world = _World(wanted, profile, directory, lives or DrawnLives(profile), progress or Silent(), on_step)
    return run_virtual(world.run(start))


def scaled(recipe: Recipe, unit: int) -> Recipe:
    """The recipe with limits on tokens in the simulation's units, and numbers where it leaves the choice."""
    rollout = recipe.rollout
    attempts = rollout.concurrency or rollout.tasks_per_step * rollout.group_size
    sandboxes = recipe.sandbox.concurrency or attempts
    return recipe.model_copy(
        update={
            "rollout": rollout.model_copy(
                update={
                    "max_tokens": max(2, rollout.max_tokens // unit),
                    "max_turn_tokens": max(1, rollout.max_turn_tokens // unit),
                    "concurrency": min(attempts, sandboxes),
                }
            ),
            "training": recipe.training.model_copy(update={"checkpoint_every": 1, "time_limit_s": 0.0}),
            # Not bubblewrap, which looks at the memory of this machine.
            "sandbox": recipe.sandbox.model_copy(
                update={"concurrency": sandboxes, "backend": "kubernetes", "image": ""}
            ),
        }
    )


class _World:
    def __init__(
        self,
        recipe: Recipe,
        profile: Profile,
        directory: Path,
        lives: Lives,
        progress: Progress,
        on_step: Callable[[int], None],
    ) -> None:
        self._recipe, self._profile, self._lives = recipe, profile, lives
        self._directory, self._progress, self._on_step = directory, progress, on_step
        self._marks: list[_Mark] = []
        self._attempts = Gauge()

    async def run(self, start: int) -> Simulated:
        recipe = self._recipe
        self._engine, self._learner = SimulatedEngine(self._profile, self._lives), SimulatedLearner(self._profile)
        self._learner.version = self._engine.version = start
        self._backend = SimulatedBackend()
        tasks = tuple(SimulatedTask(f"task-{number:06d}") for number in range(max(4096, recipe.rollout.tasks_per_step)))
        async with SandboxPool(recipe.sandbox, recipe.run.name, self._backend) as pool:
            suite = SimulatedSuite(tasks, pool, self._lives, self._attempts)
            scheduler = Scheduler(
                suite,
                self._engine,
                UnitRenderer(self._profile.unit),
                rollout=recipe.rollout,
                agent=recipe.agent,
                concurrency=recipe.rollout.concurrency,
                seed=recipe.run.seed,
            )
            store = TrajectoryStore(self._directory)
            with contextlib.closing(MetricsLog(self._directory / "metrics.jsonl")) as metrics:
                loop = TrainingLoop(
                    recipe,
                    tasks,
                    scheduler=scheduler,
                    learner=self._learner,
                    engine=self._engine,
                    store=store,
                    metrics=metrics,
                    progress=self._progress,
                    counters=dict,
                    evaluate=self._skip,
                    save=self._saved,
                    flow=self._flow(scheduler, store, tasks),
                    in_thread=in_virtual_thread,
                )
                self._mark(start)
                await loop.run(start)
                return self._measure(metrics)

    def _flow(self, scheduler: Scheduler, store: TrajectoryStore, tasks: tuple[SimulatedTask, ...]) -> Flow | None:
        recipe = self._recipe
        if not recipe.asynchrony.on:
            return None
        count, seed = recipe.rollout.tasks_per_step, recipe.run.seed
        return Flow(
            scheduler,
            store,
            Ledger(store.directory / "ledger.jsonl"),
            plan=flow_plan(recipe),
            config=recipe.asynchrony,
            draw=lambda step: choose_tasks(tasks, count=count, step=step, seed=seed),
        )

    async def _skip(self, name: str, step: int) -> None:
        """No evaluation is simulated."""

    async def _saved(self, step: int) -> None:
        self._mark(step)

    def _mark(self, step: int) -> None:
        self._marks.append(
            _Mark(
                now(),
                self._learner.busy_s,
                self._engine.tokens,
                self._backend.alive.integral(),
                self._attempts.integral(),
                Counter(self._learner.ages),
            )
        )
        self._on_step(step)

    def _measure(self, metrics: MetricsLog) -> Simulated:
        rollout = self._recipe.rollout
        total = len(self._marks) - 1
        skipped = total // 4
        ahead = self._recipe.asynchrony.max_age
        end = max(total - ahead - 1 if ahead else total, min(skipped + 1, total))
        first, last = self._marks[skipped], self._marks[end]
        steps, seconds = end - skipped, max(last.at - first.at, 1e-9)
        rows = metrics.find("train")[skipped:end]
        learner = (last.busy_s - first.busy_s) / seconds
        engine = (last.tokens - first.tokens) / seconds / self._engine.capacity
        sandboxes = (last.sandboxes - first.sandboxes) / seconds / self._recipe.sandbox.concurrency
        in_flight = (last.attempts - first.attempts) / seconds / rollout.concurrency
        return Simulated(
            steps=steps,
            before=skipped,
            after=total - end,
            seconds=seconds,
            steps_per_hour=3600 * steps / seconds,
            attempts_per_hour=3600 * steps * rollout.tasks_per_step * rollout.group_size / seconds,
            learner=learner,
            engine=engine,
            sandboxes=sandboxes,
            in_flight=in_flight,
            ages=dict(sorted((last.ages - first.ages).items())),
            cut=sum(row.get("attempts_cut", 0) for row in rows),
            dropped=sum(row.get("groups_dropped", 0) for row in rows),
            bottleneck=_bottleneck(learner, engine, sandboxes, in_flight),
        )


def _bottleneck(learner: float, engine: float, sandboxes: float, in_flight: float) -> str:
    if learner >= FULL:
        return "learner: more GPUs for it, or fewer tokens a step"
    if engine >= FULL:
        return "engine: more GPUs for it"
    if sandboxes >= FULL:
        return "sandboxes: a higher sandbox.concurrency"
    if in_flight >= FULL:
        return "attempts in flight: a higher rollout.concurrency"
    return "waiting: the last attempts of a step hold it up; a higher asynchrony.max_age, or a quorum"
