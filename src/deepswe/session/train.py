"""The main job: imitation where the recipe asks for it, evaluation, training, evaluation, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepswe.config import Recipe
from deepswe.envs.base import HasId
from deepswe.envs.splits import check_recipe
from deepswe.envs.suites import open_suite
from deepswe.errors import ConfigError
from deepswe.evaluation.run import evaluation_batches, evaluation_row, version_range
from deepswe.own_thread import OwnThread
from deepswe.policy.embedded import EmbeddedPolicy
from deepswe.policy.model_path import with_model_directory
from deepswe.policy.models import LoadedModel
from deepswe.policy.render import Renderer as ChatRenderer
from deepswe.progress import Progress
from deepswe.rollout.flow import Flow
from deepswe.rollout.ledger import Ledger
from deepswe.rollout.reference import reference_policy
from deepswe.rollout.scheduler import Batch, Scheduler
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.acting import open_policy
from deepswe.session.interrupt import run_to_end
from deepswe.session.outputs import IMITATION, summarise, write_outputs
from deepswe.session.parts import Parts
from deepswe.session.profile import (
    PROFILE,
    ProfiledPolicy,
    ProfiledSuite,
    Profiler,
    describe_profile,
    write_profile,
)
from deepswe.session.sharded import Team, follow_recipe, join_team, lead_learner, learner_options
from deepswe.training.checkpoint import save_checkpoint, to_resume
from deepswe.training.health import device_warning
from deepswe.training.imitation import Imitation, check_tokens, choose_records, write_anew
from deepswe.training.learner import Learner
from deepswe.training.loop import TrainingLoop, Updatable, choose_tasks, flow_plan
from deepswe.training.metrics import MetricsLog
from deepswe.training.run import RunDirectory, own_run, write_json
from deepswe.training.sharded_leader import LeadingLearner
from deepswe.training.writers import open_writers
from deepswe.types import Message, Trajectory


def run_recipe(recipe: Recipe, *, resume: bool, progress: Progress, profile: bool = False) -> Path:
    """Train as the recipe says, in its run directory, and write the report.

    Args:
        recipe: the whole run.
        resume: continue the run if it was begun; a finished one only gets its report anew.
        progress: is told how far it is.
        profile: write down where the wall time went (profile.json), also where the run is stopped.

    Returns:
        The path of report.html.

    Raises:
        DeepsweError: with what to do; what was recorded stays.
    """
    recipe = recipe.model_copy(update={"model": with_model_directory(recipe.model)})
    check_recipe(recipe)
    with join_team(recipe) as team:
        if team is not None and not team.leads:
            follow_recipe(recipe, team)
            return recipe.run.directory / recipe.run.name / "report.html"
        with own_run(recipe, resume=resume) as run, team.orders.led() if team else nullcontext():
            if run.summary.exists():
                progress.say(f"{run.path} is finished; its report is written anew")
                return write_outputs(run.path)
            with _profiled(run, progress) if profile else nullcontext() as profiler:
                run_to_end(_train(recipe, run, progress, team, profiler))
                return write_outputs(run.path)


def train_recipe(recipe: Recipe, *, progress: Progress) -> Path:
    """As `run_recipe`, continued if it was begun, but without a report; returns the run directory."""
    recipe = recipe.model_copy(update={"model": with_model_directory(recipe.model)})
    check_recipe(recipe)
    with own_run(recipe, resume=True) as run:
        if not run.summary.exists():
            run_to_end(_train(recipe, run, progress))
        return run.path


@contextmanager
def _profiled(run: RunDirectory, progress: Progress) -> Iterator[Profiler]:
    profiler = Profiler()
    try:
        yield profiler
    finally:
        progress.say(describe_profile(write_profile(run.path / PROFILE, profiler.row())))


async def _train(
    recipe: Recipe,
    run: RunDirectory,
    progress: Progress,
    team: Team | None = None,
    profiler: Profiler | None = None,
) -> None:
    begun = time.monotonic()
    if warning := device_warning(recipe.cluster, seen=torch.cuda.is_available()):
        progress.say(f"note: {warning}")
    mirror = open_writers(recipe.run.writers, run.path, recipe.model_dump(mode="json"), progress)
    store, metrics = TrajectoryStore(run.path), MetricsLog(run.metrics, mirror)
    earlier = sum(row.get("seconds", 0.0) for row in metrics.rows)
    try:
        async with open_suite(recipe, progress, mistakes=recipe.imitation.mistakes) as opened:
            if profiler is not None:
                opened = replace(opened, suite=ProfiledSuite(opened.suite, profiler))
            parts = Parts(recipe, opened, store, progress)
            with OwnThread("learner") as thread:
                steps = await _Main(parts, run, metrics, thread, team, profiler).run()
    finally:
        metrics.close()
    wall_s = earlier + time.monotonic() - begun
    write_json(run.summary, await asyncio.to_thread(summarise, recipe, store, steps=steps, wall_s=wall_s))


class _Main:
    """One process's share of a run."""

    def __init__(
        self,
        parts: Parts,
        run: RunDirectory,
        metrics: MetricsLog,
        thread: OwnThread,
        team: Team | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self._parts, self._recipe, self._metrics, self._team = parts, parts.recipe, metrics, team
        self._thread, self._profiler = thread, profiler
        self._imitated, self._trained = run.checkpoints / "imitation", run.checkpoints / "training"
        self._started = run.checkpoints / "start"

    async def run(self) -> int:
        self._check_tasks()
        loaded = self._parts.load_model()
        renderer = self._parts.renderer(loaded)
        learner = await self._learn_in_thread(self._make_learner, loaded)
        start = 0
        if checkpoint := to_resume(self._trained):
            if isinstance(learner, LeadingLearner):
                learner.load(checkpoint)
            else:
                learner.load_state_dict(checkpoint.learner_state())
            start = checkpoint.step
        else:
            await self._imitate(loaded, renderer)
            if learner.needs_start:
                await self._learn_in_thread(
                    save_checkpoint,
                    self._started,
                    0,
                    learner_state={"model": loaded.model.state_dict()},
                    state={},
                    keep=1,
                    model=loaded.model,
                    tokenizer=loaded.tokenizer,
                )
            await self._save(loaded, learner, 0)
        if learner.needs_start and (beginning := to_resume(self._started)):
            learner.set_start(beginning.learner_state()["model"])
        weights = learner.weights if isinstance(learner, LeadingLearner) else None
        async with open_policy(self._parts, loaded, weights) as (policy, engine):
            await engine.publish(learner.version)
            watched = policy if self._profiler is None else ProfiledPolicy(policy, self._profiler)
            if self._profiler is not None and isinstance(policy, EmbeddedPolicy):
                policy.computing = self._profiler.beside
            scheduler = self._parts.scheduler(watched, renderer)
            if start == 0:
                await self._evaluate(scheduler, "before", 0)
            return await self._learn(loaded, learner, engine, scheduler, start)

    def _make_learner(self, loaded: LoadedModel) -> Learner:
        if self._team is not None:
            return lead_learner(self._recipe, loaded, self._team)
        return Learner(loaded.model, **learner_options(self._recipe))

    def _check_tasks(self) -> None:
        """Find out now, not after the imitation, that the task set is too small or lacks a split."""
        count, weights = self._recipe.rollout.tasks_per_step, self._parts.weights
        choose_tasks(self._parts.suite.split("train"), count=count, step=0, seed=0, weights=weights)
        evaluation_batches(self._parts.suite, self._recipe.evaluation, name="before", step=0)

    async def _learn(
        self, loaded: LoadedModel, learner: Learner, engine: Updatable, scheduler: Scheduler, start: int
    ) -> int:
        loop = TrainingLoop(
            self._recipe,
            self._parts.suite.split("train"),
            scheduler=scheduler,
            learner=learner,
            engine=engine,
            store=self._parts.store,
            metrics=self._metrics,
            progress=self._parts.progress,
            counters=self._parts.counters,
            evaluate=lambda name, step: self._evaluate(scheduler, name, step),
            save=lambda step: self._save(loaded, learner, step),
            weights=self._parts.weights,
            flow=self._flow(scheduler),
            in_thread=self._learn_in_thread,
        )
        steps = await loop.run(start)
        await self._evaluate(scheduler, "after", steps)
        return steps

    async def _learn_in_thread(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._profiler is None:
            return await self._thread(work, *arguments, **options)
        with self._profiler.inside("learner"):
            return await self._thread(self._profiler.beside()(work), *arguments, **options)

    def _flow(self, scheduler: Scheduler) -> Flow | None:
        """Rollouts ahead of the steps that train them, where the recipe asks for it."""
        if not self._recipe.asynchrony.on:
            return None
        tasks, weights = self._parts.suite.split("train"), self._parts.weights
        count, seed = self._recipe.rollout.tasks_per_step, self._recipe.run.seed
        return Flow(
            scheduler,
            self._parts.store,
            Ledger(self._parts.store.directory / "ledger.jsonl"),
            plan=flow_plan(self._recipe),
            config=self._recipe.asynchrony,
            draw=lambda step: choose_tasks(tasks, count=count, step=step, seed=seed, weights=weights),
        )

    async def _evaluate(self, scheduler: Scheduler, name: str, step: int) -> None:
        for split, batch in evaluation_batches(self._parts.suite, self._recipe.evaluation, name=name, step=step):
            begun, counted = time.monotonic(), dict(self._parts.counters())
            beside = name == "step" and self._recipe.asynchrony.on
            stage = "" if beside else f"evaluation {name} ({split})"
            attempts = await self._parts.collect(scheduler, batch, stage)
            row = {**evaluation_row(attempts), **(version_range(attempts) if beside else {})}
            grown = {key: value - counted.get(key, 0) for key, value in self._parts.counters().items()}
            self._write({"kind": "evaluation", "step": step, "name": name, "split": split, **row, **grown}, begun)
            self._parts.progress.say(
                f"{split} {name}: pass@1 {row['pass_at_1']:.3f} [{row['low']:.3f}, {row['high']:.3f}] "
                f"of {row['tasks']} tasks after {step} steps"
            )

    async def _imitate(self, loaded: LoadedModel, renderer: ChatRenderer) -> None:
        config, progress = self._recipe.imitation, self._parts.progress
        if not config.steps:
            return
        options = {"seed": self._recipe.run.seed, "bfloat16": self._parts.autocast}
        imitation = await self._learn_in_thread(Imitation, loaded.model, config, self._recipe.training, **options)
        if checkpoint := to_resume(self._imitated):
            imitation.load_state_dict(checkpoint.learner_state())
        if imitation.updates >= config.steps:
            return
        trajectories = await self._imitated_trajectories(loaded, renderer)
        progress.begin("imitation", config.steps)
        progress.advance(imitation.updates)
        every = max(1, config.steps // 5)
        while imitation.updates < config.steps:
            rows: list[dict[str, float]] = []
            begun = time.monotonic()
            # One update at a time in a thread, so that an interrupt does not wait for all of them.
            await self._learn_in_thread(imitation.run, trajectories, rows.append, until=imitation.updates + 1)
            self._write({"kind": "imitation", **rows[0], "step": imitation.updates}, begun)
            progress.advance(1, note=f"loss {rows[0]['loss']:.3f}")
            if imitation.updates % every == 0 or imitation.updates == config.steps:
                state = imitation.state_dict()
                await self._learn_in_thread(
                    save_checkpoint, self._imitated, imitation.updates, learner_state=state, state={}, keep=1
                )

    async def _imitated_trajectories(self, loaded: LoadedModel, renderer: ChatRenderer) -> tuple[Trajectory, ...]:
        """The reference solver's, or recorded ones that are worth it, in the model's own tokens."""
        config = self._recipe.imitation
        if config.source == "reference":
            return await self._record_reference(renderer)
        begun = time.monotonic()
        for directory in config.runs:
            if not (directory / "trajectories").is_dir():
                raise ConfigError(f"imitation.runs names {directory}, which holds no trajectories of a run")
        found = choose_records((t for run in config.runs for t in TrajectoryStore(run).read()), config)
        if config.source == "tokens":
            check_tokens(found, int(loaded.model.config.get_text_config().vocab_size))
        else:
            tasks = {task.id: task for task in self._parts.suite.split("train")}
            openings = {task_id: await self._opening(tasks, task_id) for task_id in {t.task_id for t in found}}
            found = tuple(write_anew(t, openings[t.task_id], renderer) for t in found)
        self._write({"kind": "reference", "step": 0, "trajectories": len(found)}, begun)
        return found

    async def _opening(self, tasks: Mapping[str, HasId], task_id: str) -> Sequence[Message]:
        if task_id not in tasks:
            raise ConfigError(
                f"a recorded trajectory is of task {task_id!r}, which is none of this recipe's for training"
            )
        env = self._parts.suite.rehearse(tasks[task_id], seed=self._recipe.run.seed)
        try:
            return await env.start()
        finally:
            await env.close()

    async def _record_reference(self, renderer: ChatRenderer) -> tuple[Trajectory, ...]:
        """The reference solver's trajectories on training tasks, in the model's own tokens."""
        wanted = self._recipe.imitation.trajectories
        tasks = tuple(self._parts.suite.split("train"))[:wanted]
        batch = Batch(IMITATION, 0, tasks, -(-wanted // len(tasks)), 1.0)
        policy = reference_policy(self._parts.suite, batch, renderer, seed=self._recipe.run.seed)
        scheduler = self._parts.scheduler(policy, renderer, rehearsal=True)
        begun = time.monotonic()
        trajectories = await self._parts.collect(scheduler, batch, "reference trajectories")
        self._write({"kind": "reference", "step": 0, "trajectories": len(trajectories)}, begun)
        return trajectories

    async def _save(self, loaded: LoadedModel, learner: Learner, step: int) -> None:
        """In the learner's thread: rollouts that are under way go on meanwhile."""
        options: dict[str, Any] = {
            "state": {"step": step, "version": learner.version},
            "keep": self._recipe.training.keep_checkpoints,
            "tokenizer": loaded.tokenizer,
        }
        if isinstance(learner, LeadingLearner):
            await self._learn_in_thread(learner.save, self._trained, step, **options)
            return
        options |= {"learner_state": learner.state_dict(), "model": loaded.model}
        await self._learn_in_thread(save_checkpoint, self._trained, step, **options)

    def _write(self, row: Mapping[str, Any], begun: float) -> None:
        self._metrics.write({**row, "seconds": time.monotonic() - begun, "time_s": time.time()})
