"""Which tasks are sound: the gold patch and doing nothing, graded several times, each time in a fresh sandbox.

The last run of each sort has its tests in random order. Every run is a line of an append-only record, so that a
validation that was cut off goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from deepswe.config import BundledTasks, MicroTasks, SandboxConfig
from deepswe.cores import usable_cores
from deepswe.envs.suites import check_runnable
from deepswe.errors import StoreError, TaskError
from deepswe.grading.grade import grade
from deepswe.grading.parsers import judge
from deepswe.grading.tree import Workshop
from deepswe.jsonl import append_line, begin_so, read_lines, sole_writer
from deepswe.progress import Progress
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.tasks.bundled import bundled_task_set
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.micro.kept import kept_micro_task_set
from deepswe.tasks.task import HiddenTests, Measured, Task, TaskSet, Verdict
from deepswe.tasks.taskset import load_task_set, save_task_set, task_set_hash
from deepswe.types import Graded, Ungraded

Kind = Literal["gold", "noop"]
Order = Literal["given", "random"]

TRIES = 3
"""A run that the infrastructure ended is made again, up to so many times in all."""
ORDER_PLUGIN = "deepswe_random_order"
_BEGINNING = b'{"task":"'
"""How each line of a record begins."""
_TIMED_OUT = "the tests took more than"
_NETWORK = re.compile(
    r"gaierror|name resolution|Name or service not known|Network is unreachable|NewConnectionError|ConnectError"
    r"|URLError|No address associated|Failed to resolve",
)
_ORDER_SOURCE = '''"""Runs the tests in a random order: files, classes in a file and tests in a class keep together."""

import random

SEED = {seed}


def pytest_collection_modifyitems(items):
    """Sort by random numbers, one for each level."""
    draw, places = random.Random(SEED), {{}}
    for item in items:
        parts = item.nodeid.split("::")
        for depth in range(len(parts)):
            places.setdefault("::".join(parts[: depth + 1]), draw.random())
    items.sort(key=lambda item: [places["::".join(item.nodeid.split("::")[: at + 1])]
                                 for at in range(item.nodeid.count("::") + 1)])
'''

Item = TypeVar("Item")


class RunRow(BaseModel):
    """One graded run, as it is recorded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    fingerprint: str
    """Of the task and its hidden tests as they were."""
    kind: Kind
    number: int
    order: Order
    reward: float
    bad: Mapping[str, str] = {}
    """Test -> status, of the tests that did not end as they must."""
    reason: str = ""
    wall_s: float = 0.0

    @property
    def timed_out(self) -> bool:
        """The tests were cut off."""
        return self.reason.startswith(_TIMED_OUT)


@dataclass(frozen=True, slots=True)
class Validation:
    """What the runs of one task say.

    Attributes:
        task_id: whose.
        verdict: "" where there is none, for the reason given.
        reason: one sentence where the verdict is not "sound".
        flaky: tests whose status changed between runs of one sort.
        runtime_s: median of one grading of the gold patch; None without one.
    """

    task_id: str
    verdict: Verdict
    reason: str = ""
    flaky: tuple[str, ...] = ()
    runtime_s: float | None = None


def judge_runs(hidden: HiddenTests, gold: Sequence[RunRow], noop: Sequence[RunRow]) -> Validation:
    """The verdict on a task whose runs are all there.

    Sound: every gold run has reward 1, no no-op run has, and no test changes its status within one sort. Flaky: the
    same holds without the tests that do change. Unsound: everything else.
    """
    runtime_s = round(statistics.median(run.wall_s for run in gold), 3) if gold else None

    def verdict(word: Verdict, reason: str = "", flaky: Sequence[str] = ()) -> Validation:
        return Validation(hidden.task_id, word, reason, tuple(flaky), runtime_s)

    slow = next((run for run in gold if run.timed_out), None)
    if slow is not None:
        return verdict("unsound", f"timeout: with the gold patch {slow.reason}")
    constant = [test for test in hidden.tests if all(test in run.bad for run in gold)]
    if constant:
        return verdict("unsound", _why_gold_fails(constant[0], gold))
    refused = next((run for run in gold if run.reward < 1.0 and not run.bad), None)
    if refused is not None:
        return verdict("unsound", f"the gold patch fails: {refused.reason}")
    ended = [run for run in noop if not run.timed_out]
    flaky = [test for test in hidden.tests if _changes(test, gold) or _changes(test, ended)]
    left = [test for test in hidden.fail_to_pass if test not in flaky]
    idle = next((run for run in ended if not any(test in run.bad for test in left)), None)
    if idle is not None and (idle.reward >= 1.0 or flaky):
        words = "without the flaky tests " if flaky else ""
        return verdict("unsound", f"{words}doing nothing passes every test", flaky)
    if flaky:
        return verdict("flaky", f"{len(flaky)} tests change between runs: {flaky[0]}", flaky)
    return verdict("sound")


def _changes(test: str, runs: Sequence[RunRow]) -> bool:
    return len({test in run.bad for run in runs}) > 1


def _why_gold_fails(test: str, gold: Sequence[RunRow]) -> str:
    needs = "a test needs the network: " if any(_NETWORK.search(run.reason) for run in gold) else ""
    return f"the gold patch fails: {needs}{test} is {gold[0].bad[test]} in all {len(gold)} runs ({gold[0].reason})"


def in_random_order(task: Task, hidden: HiddenTests, seed: int) -> HiddenTests:
    """The same tests, run in another order. A script's tests stay as they are."""
    draw = random.Random(seed)
    if hidden.runner == "script":
        return hidden
    if hidden.runner == "unittest":
        return replace(
            hidden,
            fail_to_pass=tuple(draw.sample(hidden.fail_to_pass, len(hidden.fail_to_pass))),
            pass_to_pass=tuple(draw.sample(hidden.pass_to_pass, len(hidden.pass_to_pass))),
        )
    place = task.repository.pythonpath[0] if task.repository.pythonpath else ""
    path = f"{place}/{ORDER_PLUGIN}.py".removeprefix("./").lstrip("/")
    plugin = {path: _ORDER_SOURCE.format(seed=draw.randrange(1 << 30))}
    return replace(hidden, files={**hidden.files, **plugin}, arguments=(*hidden.arguments, "-p", ORDER_PLUGIN))


class RunRecord:
    """The record of a validation: one run a line, a torn last line dropped."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Open or begin a record.

        Args:
            path: of the file.
            resume: go on with it if it is there.

        Raises:
            TaskError: it is there and not to be resumed, or cannot be used.
        """
        self.path = path
        self.rows: dict[tuple[str, str, str, int], RunRow] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines, rest = read_lines(path)
            if not begin_so(lines, rest, _BEGINNING):
                raise TaskError(f"{path} is no record of a validation; name another file, it stays as it is")
            if lines and not resume:
                raise TaskError(f"{path} holds the runs of an earlier validation; add --resume, or remove it")
            for line in lines:
                self._hold(RunRow.model_validate_json(line))
        except (OSError, ValidationError) as error:
            raise TaskError(f"record {path} cannot be used: {error}; remove it to begin anew") from error

    def find(self, task: str, fingerprint: str, kind: Kind, number: int) -> RunRow | None:
        """A run that was made on the task as it is now."""
        return self.rows.get((task, fingerprint, kind, number))

    def add(self, row: RunRow) -> None:
        """Keep a run, written before this returns.

        Raises:
            StoreError: it could not be written; what was written before stays.
        """
        try:
            append_line(self.path, row.model_dump_json(exclude_defaults=True).encode())
        except OSError as error:
            raise StoreError(f"record {self.path} cannot be written: {error.strerror}") from error
        self._hold(row)

    def _hold(self, row: RunRow) -> None:
        self.rows[row.task, row.fingerprint, row.kind, row.number] = row


@dataclass(slots=True)
class _Progressing:
    """The runs of one task that are over."""

    rows: dict[tuple[Kind, int], RunRow] = field(default_factory=dict)
    failure: str = ""


async def validate(
    tasks: TaskSet,
    workshop: Workshop,
    record: RunRecord,
    progress: Progress,
    *,
    runs: int = 3,
    workers: int = 0,
    seed: int = 0,
    on_verdict: Callable[[Validation], None] = lambda validation: None,
) -> tuple[Validation, ...]:
    """Validate every task of a set.

    Args:
        tasks: the set, with its layers in the workshop's cache.
        workshop: where sandboxes come from.
        record: of runs that were made already; gets the new ones.
        progress: told of each run.
        runs: of each sort, gold and no-op; of two or more the last is in random order.
        workers: runs at once; 0 takes one a core.
        seed: of the random order.
        on_verdict: told of each task as soon as its last run is over.

    Returns:
        One validation a task, in the order of the set.

    Raises:
        ValueError: fewer than one run.
    """
    if runs < 1:
        raise ValueError(f"runs is {runs}; a validation needs at least 1 run of each sort")
    prints = {task.id: fingerprint(tasks, task) for task in tasks.tasks}
    states = {task.id: _Progressing() for task in tasks.tasks}
    found: dict[str, Validation] = {}
    progress.begin("Validation", 2 * runs * len(tasks.tasks))

    async def one(item: tuple[Task, Kind, int]) -> None:
        task, kind, number = item
        hidden, state = tasks.hidden[task.id], states[task.id]
        if not hidden.gold_patch:
            state.failure = "it has no gold patch to validate by"
        row = record.find(task.id, prints[task.id], kind, number)
        if row is None and not state.failure:
            order: Order = "random" if runs > 1 and number == runs - 1 and hidden.runner != "script" else "given"
            made = await _run(task, hidden, workshop, kind, number, order, seed, prints[task.id])
            if isinstance(made, Ungraded):
                state.failure = f"it could not be graded: {made.error}"
            else:
                row = made
                record.add(row)
        if row is not None:
            state.rows[kind, number] = row
        progress.advance(note=task.id)
        if len(state.rows) == 2 * runs and task.id not in found:
            gold, noop = ([state.rows[sort, at] for at in range(runs)] for sort in ("gold", "noop"))
            found[task.id] = judge_runs(hidden, gold, noop)
            on_verdict(found[task.id])

    kinds: tuple[Kind, ...] = ("gold", "noop")
    plan = [(task, kind, number) for task in tasks.tasks for number in range(runs) for kind in kinds]
    await _spread(plan, one, workers or usable_cores())
    for task in tasks.tasks:
        if task.id not in found:
            found[task.id] = Validation(task.id, "", states[task.id].failure)
            on_verdict(found[task.id])
    return tuple(found[task.id] for task in tasks.tasks)


async def _spread(items: Sequence[Item], one: Callable[[Item], Awaitable[None]], width: int) -> None:
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await one(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(width, len(items))):
            group.create_task(worker())


async def _run(
    task: Task,
    hidden: HiddenTests,
    workshop: Workshop,
    kind: Kind,
    number: int,
    order: Order,
    seed: int,
    print_: str,
) -> RunRow | Ungraded:
    asked = in_random_order(task, hidden, seed + number) if order == "random" else hidden
    patch = hidden.gold_patch if kind == "gold" else ""
    failure = Ungraded("never tried", "validation")
    for _ in range(TRIES):
        begun = time.monotonic()
        verdict = await grade(patch, task, asked, workshop)
        if isinstance(verdict, Graded):
            wall_s = round(time.monotonic() - begun, 3)
            return RunRow(
                task=task.id,
                fingerprint=print_,
                kind=kind,
                number=number,
                order=order,
                reward=verdict.reward,
                bad=wrong_tests(hidden, verdict),
                reason=verdict.reason[:500],
                wall_s=wall_s,
            )
        failure = verdict
    return failure


def wrong_tests(hidden: HiddenTests, verdict: Graded) -> dict[str, str]:
    """The tests that did not end as they must, with their statuses; none where the reward is whole.

    Under a source's own parser a test may be right without passing: P2P that is skipped, or one that is expected to
    fail (`deepswe.grading.parsers.COUNTS`; R2E-Gym apart, which expects an exact status).
    """
    if verdict.reward >= 1.0:
        return {}
    right = frozenset(t for t in hidden.tests if verdict.statuses.get(t) == hidden.expected.get(t, "passed"))
    if hidden.runner == "script" and hidden.parser != "r2e-gym":
        right = judge(verdict.statuses, hidden).right
    return {test: verdict.statuses.get(test, "missing") for test in hidden.tests if test not in right}


def fingerprint(tasks: TaskSet, task: Task) -> str:
    """Changes with anything of a task or of its hidden tests."""
    return task_set_hash(TaskSet((task,), {task.id: tasks.hidden[task.id]})).removeprefix("sha256:")[:16]


def with_validations(tasks: TaskSet, validations: Sequence[Validation]) -> TaskSet:
    """The set with what validation found: verdicts, runtimes, and flaky tests taken out of the tests by id.

    A task whose verdict is "flaky" is another one without its flaky tests: validated again, it can be sound.
    """
    hidden, measured = dict(tasks.hidden), dict(tasks.measured)
    for row in validations:
        old = hidden[row.task_id]
        before = measured.get(row.task_id, Measured())
        measured[row.task_id] = replace(
            before,
            verdict=row.verdict,
            reason=row.reason,
            runtime_s=row.runtime_s if row.runtime_s is not None else before.runtime_s,
        )
        if row.flaky and row.verdict == "flaky":
            hidden[row.task_id] = replace(
                old,
                fail_to_pass=tuple(test for test in old.fail_to_pass if test not in row.flaky),
                pass_to_pass=tuple(test for test in old.pass_to_pass if test not in row.flaky),
                quarantined=(*old.quarantined, *row.flaky),
            )
    return TaskSet(tasks.tasks, hidden, measured)


def summarise(validations: Sequence[Validation]) -> dict[str, object]:
    """What the command prints: counts by verdict, and a row for each task that is not sound."""
    counts = {word: sum(row.verdict == word for row in validations) for word in ("sound", "flaky", "unsound")}
    rest = [json.loads(json.dumps(asdict(row))) for row in validations if row.verdict != "sound"]
    runtimes = [row.runtime_s for row in validations if row.runtime_s is not None]
    return {
        "tasks": len(validations),
        **counts,
        "no_verdict": sum(not row.verdict for row in validations),
        "runtime_s": round(statistics.median(runtimes), 3) if runtimes else 0.0,
        "not_sound": rest,
    }


def load_target(target: str, *, limit: int = 0, progress: Progress) -> TaskSet:
    """A task set by the name that commands give it, its layers built where this package knows how.

    Args:
        target: path of a task-set file, "bundled" or "micro" (the default settings of either).
        limit: at most this many tasks; 0 takes all.
        progress: told of what is built.

    Raises:
        DeepsweError: it cannot be loaded or built.
    """
    if target == "bundled":
        return bundled_task_set(BundledTasks(limit=limit), LayerCache.default(), progress)
    if target == "micro":
        whole = MicroTasks()
        few = MicroTasks(train=limit, heldout=0, unseen=0) if 0 < limit <= whole.train else whole
        tasks = kept_micro_task_set(few, LayerCache.default(), progress)
    else:
        tasks = load_task_set(Path(target))
    return tasks.only([task.id for task in tasks.tasks[:limit]]) if limit else tasks


def validate_target(
    target: str,
    tasks: TaskSet,
    progress: Progress,
    *,
    runs: int = 3,
    workers: int = 0,
    out: Path | None = None,
    record: Path | None = None,
    resume: bool = False,
    sandbox: SandboxConfig | None = None,
    cache: LayerCache | None = None,
) -> tuple[Validation, ...]:
    """Validate a target in sandboxes of its own, and write the set with its verdicts.

    Args:
        target: as for `load_target`; a file gets the verdicts unless `out` is given, the other two only with `out`.
        tasks: what `load_target` gave.
        progress: told of each run.
        runs, workers: as for `validate`.
        out: where the set goes.
        record: of the runs; by default beside the set.
        resume: go on with the record.
        sandbox, cache: where the runs happen and the layers lie; the defaults if None.

    Raises:
        DeepsweError: no sandbox runs here, the backend cannot run one of the tasks, or a file cannot be used.
    """
    named = target in ("bundled", "micro")
    path = out or (None if named else Path(target))
    layers = cache or LayerCache.default()
    config = sandbox or SandboxConfig()
    check_runnable(tasks, config.backend, layers)
    place = record or Path(f"{path or target}.validation.jsonl")

    async def run(book: RunRecord) -> tuple[Validation, ...]:
        async with SandboxPool(config, "validate") as pool:
            workshop = Workshop(pool.open, layers.path, limits_of(config), {"run": "validate"})
            return await validate(tasks, workshop, book, progress, runs=runs, workers=workers)

    with sole_writer(place):
        found = asyncio.run(run(RunRecord(place, resume=resume)))
        if path is not None:
            whole = tasks if named else load_task_set(Path(target))
            save_task_set(with_validations(whole, found), path)
    return found
