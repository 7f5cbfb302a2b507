"""Generate tests for tasks, and run candidates against them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from deepswe.config import Recipe
from deepswe.cores import usable_cores
from deepswe.envs.splits import check_split, tasks_of_split
from deepswe.envs.suites import open_suite
from deepswe.envs.swe import SweSuite
from deepswe.errors import ConfigError, StoreError, TaskError
from deepswe.jsonl import append_line, begin_so, read_lines, sole_writer
from deepswe.policy.base import Policy, Renderer
from deepswe.policy.scripted import ByteRenderer
from deepswe.progress import Progress
from deepswe.rollout.reference import reference_policy
from deepswe.rollout.scheduler import Batch
from deepswe.rollout.store import TrajectoryStore
from deepswe.scaling.candidates import Candidate
from deepswe.scaling.checks import (
    Checks,
    Written,
    join_written,
    load_checks,
    read_written,
    runner_of,
    settle_checks,
)
from deepswe.scaling.matrix import Matrix, run_candidates, score_runs
from deepswe.scaling.scores import ScoreBook
from deepswe.scaling.visible import visible_tests
from deepswe.scaling.writing import WritingSuite
from deepswe.scaling.writing_script import missing_in
from deepswe.session.interrupt import run_to_end
from deepswe.session.parts import Parts
from deepswe.tasks.task import Task
from deepswe.training.run import own_run
from deepswe.types import Graded, Trajectory, Ungraded

Writer = Literal["script", "model"]


def generate_tests(
    recipe: Recipe,
    *,
    writer: Writer,
    split: str,
    attempts: int,
    limit: int,
    out: Path,
    resume: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Write tests for the tasks of a split, decide on the base which are kept, and record them task by task.

    Args:
        recipe: names tasks, sandboxes, the model, and the run directory in which the attempts are kept.
        writer: the script, or the recipe's model.
        split: which tasks.
        attempts: at each task; their tests are joined.
        limit: at most this many tasks; 0 takes all.
        out: file of checks (JSONL), one line a task, appended; a task that is in it is not tried again.
        resume: take up the attempts if they were begun.
        progress: is told how far it is.

    Returns:
        tasks, with_tests, without_tests (why a task has none -> how many), generated and regression (tests kept),
        dropped (tests), ungraded (tasks).

    Raises:
        DeepsweError: also when the split is empty or no attempt has a verdict.
    """

    async def work(store: TrajectoryStore, book: CheckBook) -> dict[str, Any]:
        async with _open_swe(recipe, progress) as (opened, suite):
            tasks = tasks_of_split(suite, split)[: limit or None]
            writing = WritingSuite(suite, recipe.agent)
            parts = Parts(recipe, replace(opened, suite=writing), store, progress)
            batch = Batch(f"tests_{writer}_{split}", 0, tasks, attempts, recipe.evaluation.temperature)
            async with _writing(parts, writer, batch) as (policy, renderer):
                scheduler = parts.scheduler(policy, renderer, count_tokens=writer == "model")
                tried = await parts.collect(scheduler, batch, f"writing tests: {split}")
            return await _settle(tasks, tried, suite, book, progress)

    check_split(recipe, split)
    with sole_writer(out):
        book = CheckBook.open(out)
        with own_run(recipe, resume=resume) as run:
            return run_to_end(work(TrajectoryStore(run.path), book))


async def _settle(
    tasks: Sequence[Task], tried: Sequence[Trajectory], suite: SweSuite, book: CheckBook, progress: Progress
) -> dict[str, Any]:
    failed: list[str] = []
    todo = iter([task for task in tasks if task.id not in book.checks])
    progress.begin("tests on the base", sum(task.id not in book.checks for task in tasks))

    async def worker() -> None:
        for task in todo:
            written = join_written(kept_tests(task, t) for t in tried if t.task_id == task.id)
            own = await visible_tests(task, suite.workshop)
            found = await settle_checks(task, written, own, suite.workshop)
            if isinstance(found, Ungraded):
                failed.append(task.id)
                progress.say(f"{task.id}: {found.error}")
            else:
                book.add(found)
            progress.advance(note=task.id)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(usable_cores(), len(tasks))):
            group.create_task(worker())
    held = [book.checks[task.id] for task in tasks if task.id in book.checks]
    without = [task for task in tasks if task.id in book.checks and not book.checks[task.id].generated]
    return {
        "tasks": len(tasks),
        "with_tests": sum(bool(checks.generated) for checks in held),
        "without_tests": dict(Counter(why_none(task, book.checks[task.id], tried) for task in without).most_common()),
        "generated": sum(len(checks.generated) for checks in held),
        "regression": sum(len(checks.regression) for checks in held),
        "dropped": sum(len(checks.dropped) for checks in held),
        "ungraded": len(failed),
        "out": str(book.path),
    }


def why_none(task: Task, checks: Checks, tried: Sequence[Trajectory]) -> str:
    """Why no generated test of a task was kept, in one line."""
    said = dict.fromkeys(checks.dropped.values())
    said |= dict.fromkeys(t.grade.reason for t in tried if t.task_id == task.id and isinstance(t.grade, Graded))
    reasons = [reason for reason in said if reason]
    return "; ".join(reasons) or missing_in(task.problem_statement) or "no test was written"


def kept_tests(task: Task, trajectory: Trajectory) -> Written:
    """The tests of an attempt that were kept when it was judged; none where it wrote nothing of use."""
    if not trajectory.reward:
        return Written()
    written = read_written(trajectory.artifact, runner_of(task))
    kept = trajectory.grade.statuses if not isinstance(trajectory.grade, Ungraded) else {}
    return Written(written.files, tuple(test for test in written.tests if test in kept))


def run_tests(
    recipe: Recipe,
    candidates: Sequence[Candidate],
    *,
    tests: Path,
    matrix: Path,
    scores: ScoreBook,
    workers: int,
    progress: Progress,
) -> dict[str, Any]:
    """Run candidates against the tests of their tasks, each patch in a fresh sandbox, and score them.

    Args:
        recipe: names tasks and sandboxes.
        candidates: of any of its tasks.
        tests: file of checks.
        matrix: record of runs (JSONL), appended; what is in it is not run again.
        scores: gets `regression` and `reproduction`.
        workers: runs at once; 0 takes one a core.
        progress: is told how far it is.

    Returns:
        candidates, unchecked, runs, known (patches run before), unscored, failures (task -> error).

    Raises:
        DeepsweError: a file cannot be used, or a candidate is of a task that the recipe does not have.
    """
    if not tests.is_file():
        raise ConfigError(f"there are no tests in {tests}; make them with `deepswe tests generate`")
    checks = CheckBook.open(tests).checks

    async def work(record: Matrix) -> dict[str, Any]:
        async with _open_swe(recipe, progress) as (_, suite):
            tasks = {task.id: task for task in suite.tasks.tasks}
            ran = await run_candidates(candidates, tasks, checks, record, suite.workshop, progress, workers=workers)
            return {**asdict(ran), "failures": dict(ran.failures)}

    with sole_writer(matrix), sole_writer(scores.path):
        record = Matrix.open(matrix)
        answer = run_to_end(work(record))
        return {**answer, "unscored": score_runs(candidates, checks, record, scores)}


class CheckBook:
    """Checks on disk: append-only JSONL, one line a task; the last line of a task counts."""

    def __init__(self, path: Path, checks: Mapping[str, Checks]) -> None:
        self.path, self.checks = path, dict(checks)

    @classmethod
    def open(cls, path: Path) -> CheckBook:
        """Read what is there, and change nothing.

        Raises:
            ConfigError: the file cannot be read.
            TaskError: a line is no record of checks, nor the torn beginning of one at the end.
        """
        try:
            lines, rest = read_lines(path)
        except OSError as error:
            raise ConfigError(f"tests {path} cannot be read: {error.strerror}; give another file") from error
        if not begin_so(lines, rest, b'{"task_id":'):
            raise TaskError(f"{path} is no file of generated tests; give one of `deepswe tests generate`")
        checks = {}
        for number, line in enumerate(lines, start=1):
            try:
                found = load_checks(json.loads(line))
            except (ValueError, RecursionError, TaskError) as error:
                raise TaskError(f"{path}:{number}: {error}") from error
            checks[found.task_id] = found
        return cls(path, checks)

    def add(self, checks: Checks) -> None:
        """Keep the checks of a task, written before this returns.

        Raises:
            StoreError: they could not be written.
        """
        try:
            append_line(self.path, json.dumps(asdict(checks), separators=(",", ":")).encode())
        except OSError as error:
            raise StoreError(f"tests cannot be written to {self.path}: {error.strerror}") from error
        self.checks[checks.task_id] = checks


@asynccontextmanager
async def _open_swe(recipe: Recipe, progress: Progress) -> AsyncIterator[tuple[Any, SweSuite]]:
    async with open_suite(recipe, progress) as opened:
        if not isinstance(opened.suite, SweSuite):
            raise ConfigError(
                f"tests are for repositories, and tasks.kind is {recipe.tasks.kind!r}; give micro, bundled or taskset"
            )
        yield opened, opened.suite


@asynccontextmanager
async def _writing(parts: Parts, writer: Writer, batch: Batch) -> AsyncIterator[tuple[Policy, Renderer]]:
    if writer == "script":
        renderer = ByteRenderer()
        yield reference_policy(parts.suite, batch, renderer, seed=parts.recipe.run.seed), renderer
        return
    loaded = parts.load_model()
    with parts.engine(loaded) as engine:
        yield engine, parts.renderer(loaded)
