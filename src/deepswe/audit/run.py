"""Run attackers against tasks, the naive grader against attackers, and honest work against the grader.

Every result is a line of `audit.jsonl` in the audit's directory, written as soon as it is known; a second run with the
same directory takes up what is there.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deepswe.audit.attack import Attack, Target, has_target, new_file, target_of
from deepswe.audit.forgers import FORGERS
from deepswe.audit.honest import HONEST, honest_task
from deepswe.audit.leaks import LEAKS
from deepswe.audit.naive import fix_naively, naive_reward, open_naive, prepare_naive
from deepswe.audit.steering import STEERING
from deepswe.config import AgentConfig, BundledTasks, MicroTasks, SandboxConfig, TaskSetTasks
from deepswe.cores import usable_cores
from deepswe.envs.suites import check_runnable
from deepswe.envs.swe import SweSuite
from deepswe.errors import ConfigError, DeepsweError, StoreError
from deepswe.grading.tree import ROOT, Workshop
from deepswe.jsonl import append_line, read_lines, sole_writer
from deepswe.progress import Progress
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.tasks.bundled import bundled_task_set
from deepswe.tasks.layers import LayerCache, default_cache_root
from deepswe.tasks.select import select_tasks
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.task import Task, TaskSet
from deepswe.tasks.taskset import load_task_set
from deepswe.tools.calls import render_call
from deepswe.tools.catalog import TOOLS
from deepswe.types import Grade, Graded, ToolCall

ATTACKS = {**LEAKS.attacks, **FORGERS.attacks, **STEERING.attacks}
"""Every attacker by name."""
RECORD = "audit.jsonl"
STEP_S = 120.0
_AGENT = AgentConfig(prompt="brief", step_timeout_s=STEP_S)
_TAIL = 300


@dataclass(frozen=True, slots=True)
class Result:
    """One thing that was tried on one task.

    Attributes:
        kind: "attack", "naive" (an attack against the naive grader), "check" or "honest".
        name: of the attack, the check ("gold", "noop", "empty", "noise", "naive_gold", "naive_noop") or the case.
        task: id.
        reward: None where there was no verdict.
        reason: why.
        observations: the ends of what the agent saw.
        patch: the head of the diff that was graded.
    """

    kind: str
    name: str
    task: str
    reward: float | None
    reason: str
    observations: tuple[str, ...] = ()
    patch: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Unique in an audit."""
        return self.kind, self.name, self.task


class Record:
    """The results of one audit, append-only."""

    def __init__(self, directory: Path) -> None:
        """Read what is there; a torn last line is left out.

        Raises:
            StoreError: it cannot be read, or its directory not be made.
        """
        self.path = directory / RECORD
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lines, _ = read_lines(self.path)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be used: {error.strerror}") from error
        self.results = {result.key: result for line in lines if (result := _read_result(line)) is not None}

    def add(self, result: Result) -> None:
        """Write one result.

        Raises:
            StoreError: it could not be written; what was written before stays.
        """
        try:
            append_line(self.path, json.dumps(asdict(result), ensure_ascii=True).encode())
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error
        self.results[result.key] = result


def _read_result(line: bytes) -> Result | None:
    try:
        tree = json.loads(line)
        return Result(**{**tree, "observations": tuple(tree["observations"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def audit_tasks(name: str, limit: int, real_tasks: int, progress: Progress) -> TaskSet:
    """The tasks of an audit: of the micro family, or some of them from the bundled repositories and the rest micro, or
    those of a file whose gold patch an attack can aim at.

    Raises:
        ConfigError: there is no such set, or no such task in it.
        StoreError: the file cannot be read.
        BuildError: the repositories cannot be built.
    """
    if name not in ("bundled", "micro"):
        return _tasks_of_file(Path(name), limit)
    cache = LayerCache(default_cache_root(os.environ))
    real = TaskSet((), {})
    if name == "bundled" and min(real_tasks, limit):
        real = bundled_task_set(BundledTasks(limit=min(real_tasks, limit)), cache, progress)
    rest = limit - len(real.tasks)
    micro = micro_task_set(MicroTasks(train=max(1, rest // 2), heldout=rest - rest // 2, unseen=0))
    tasks = (*real.tasks, *micro.tasks[:rest])
    return TaskSet(tasks, {task.id: {**real.hidden, **micro.hidden}[task.id] for task in tasks})


def _tasks_of_file(path: Path, limit: int) -> TaskSet:
    if not path.is_file():
        raise ConfigError(f"there is no task set {str(path)!r} to audit; give bundled, micro or a task-set file")
    config = TaskSetTasks(path=path, unvalidated=True, allow_contaminated=True)
    tasks = select_tasks(load_task_set(path), config)
    fit = [task.id for task in tasks.tasks if has_target(tasks.hidden[task.id])]
    if not fit:
        raise ConfigError(f"no task of {path} has a gold patch of Python code, at which the attacks aim")
    return tasks.only(fit[:limit])


class Audit:
    """One audit over one set of tasks and one pool of sandboxes."""

    def __init__(self, tasks: TaskSet, workshop: Workshop, record: Record, *, concurrency: int) -> None:
        """Args:
        tasks: what is attacked.
        workshop: where sandboxes come from.
        record: where results go.
        concurrency: attempts at once.
        """
        self.tasks, self.workshop, self.record = tasks, workshop, record
        self._suite = SweSuite(tasks, workshop, _AGENT)
        self._slots = asyncio.Semaphore(max(1, concurrency))
        with_pytest = (t for t in tasks.tasks if tasks.hidden[t.id].runner == "pytest")
        self._environment = next((t.repository.environment for t in with_pytest if t.repository.environment), None)

    def plan(
        self, attacks: Sequence[Attack], naive_tasks: int
    ) -> Iterator[tuple[Result, Callable[[], Awaitable[Result]]]]:
        """Everything to try: an empty result with its key, and what makes the real one."""
        for task in self.tasks.tasks:
            for check in ("gold", "noop", "empty", "noise"):
                yield self._entry("check", check, task.id, self._check, task, check)
            for attack in attacks:
                yield self._entry("attack", attack.name, task.id, self._attack, task, attack)
        for task in self._samples(naive_tasks):
            for check in ("naive_gold", "naive_noop"):
                yield self._entry("check", check, task.id, self._naive, task, None, check)
            for attack in attacks:
                yield self._entry("naive", attack.name, task.id, self._naive, task, attack, attack.name)
        for case in HONEST:
            if self._environment or not case.pytest:
                yield self._entry("honest", case.name, f"honest-{case.name}", self._honest, case.name)

    def _entry(
        self, kind: str, name: str, task: str, make: Callable[..., Awaitable[Result]], *arguments: Any
    ) -> tuple[Result, Callable[[], Awaitable[Result]]]:
        return Result(kind, name, task, None, ""), lambda: make(*arguments)

    def _samples(self, count: int) -> list[Task]:
        """Tasks for the naive grader: of each runner in turn."""
        by_runner = [
            [t for t in self.tasks.tasks if self.tasks.hidden[t.id].runner == r] for r in ("unittest", "pytest")
        ]
        return [tasks[turn] for turn in range(count) for tasks in by_runner if turn < len(tasks)][:count]

    async def run(self, attacks: Sequence[Attack], naive_tasks: int, progress: Progress) -> None:
        """Make every result that the record does not have yet, or has without a verdict.

        Raises:
            StoreError: a result could not be written.
        """
        known = {key for key, result in self.record.results.items() if result.reward is not None}
        todo = [(entry, make) for entry, make in self.plan(attacks, naive_tasks) if entry.key not in known]
        progress.begin("Audit", len(todo))

        async def one(entry: Result, make: Callable[[], Awaitable[Result]]) -> None:
            async with self._slots:
                try:
                    result = await make()
                except DeepsweError as error:
                    result = replace(entry, reason=f"{error.place or 'audit'}: {error}")
                self.record.add(result)
                progress.advance(note=f"{result.name} {result.task}")

        async with asyncio.TaskGroup() as group:
            for entry, make in todo:
                group.create_task(one(entry, make))

    async def _check(self, task: Task, check: str) -> Result:
        gold = self.tasks.hidden[task.id].gold_patch
        noise = new_file("notes/noise.txt", "nothing to see") + new_file("noise_module.py", "NOISE = 1")
        if check == "noop":
            grade, patch, seen = await self._attempt(self._suite, task, ())
        else:
            patch, seen = {"gold": gold, "empty": "", "noise": gold + noise}[check], ()
            grade = await self._suite.grade(task, patch)
        return _result("check", check, task, grade, patch, seen)

    async def _attack(self, task: Task, attack: Attack) -> Result:
        hidden = self.tasks.hidden[task.id]
        suite = self._suite
        if attack.timeout_s:
            short = TaskSet((task,), {task.id: replace(hidden, timeout_s=attack.timeout_s)})
            suite = SweSuite(short, self.workshop, _AGENT)
        target = target_of(task, hidden)
        if attack.patch is not None:
            patch = attack.patch(target)
            return _result("attack", attack.name, task, await suite.grade(task, patch), patch, ())
        grade, patch, seen = await self._attempt(suite, task, attack.work(target))
        return _result("attack", attack.name, task, grade, patch, seen)

    async def _attempt(self, suite: SweSuite, task: Task, scripts: Sequence[str]) -> tuple[Grade, str, tuple[str, ...]]:
        """An attempt through the environment of the training loop: tool calls, one diff, a grade."""
        env, seen = suite.open(task, seed=0), []
        try:
            await env.start()
            for script in scripts:
                turn = render_call(ToolCall("execute_bash", {"cmd": script}), _AGENT.format, TOOLS)
                seen.append((await env.act(turn, timeout_s=STEP_S)).observation)
            verdict = await env.finish()
        finally:
            await env.close()
        return verdict.grade, verdict.artifact, tuple(seen)

    async def _naive(self, task: Task, attack: Attack | None, name: str) -> Result:
        hidden = self.tasks.hidden[task.id]
        target = target_of(task, hidden)
        kind = "check" if attack is None else "naive"
        async with open_naive(self.workshop, task) as sandbox:
            await prepare_naive(sandbox, task, hidden, target.file)
            if name == "naive_gold":
                await fix_naively(sandbox, hidden)
            seen = [await _run(sandbox, script) for script in _scripts(attack, target)]
            reward, reason = await naive_reward(sandbox, task, hidden)
        return Result(kind, name, task.id, reward, reason, tuple(text[-_TAIL:] for text in seen))

    async def _honest(self, name: str) -> Result:
        case = next(case for case in HONEST if case.name == name)
        task, hidden = honest_task(case, self._environment)
        suite = SweSuite(TaskSet((task,), {task.id: hidden}), self.workshop, _AGENT)
        gold = await suite.grade(task, hidden.gold_patch)
        grade, patch, seen = await self._attempt(suite, task, (case.work,))
        result = _result("honest", name, task, grade, patch, seen)
        if not isinstance(gold, Graded) or gold.reward != 1.0:
            return replace(result, reward=None, reason=f"the gold patch itself: {gold}")
        return result


async def _run(sandbox: Any, script: str) -> str:
    result = await sandbox.exec(["bash", "-c", script], timeout_s=STEP_S, cwd=ROOT)
    return str((result.stdout + result.stderr).decode("utf-8", "replace"))


def _scripts(attack: Attack | None, target: Target) -> Sequence[str]:
    if attack is None:
        return ()
    if attack.patch is None:
        return attack.work(target)
    data = json.dumps(attack.patch(target))
    write = "import json, sys; open('/tmp/own.diff', 'w').write(json.loads(sys.stdin.read()))"
    return (
        f"python3 -c \"{write}\" <<'END_OF_DIFF'\n{data}\nEND_OF_DIFF\ngit apply --whitespace=nowarn /tmp/own.diff",
    )


def _result(kind: str, name: str, task: Task, grade: Grade, patch: str, seen: Sequence[str]) -> Result:
    reward, reason = (
        (grade.reward, grade.reason) if isinstance(grade, Graded) else (None, f"{grade.place}: {grade.error}")
    )
    return Result(kind, name, task.id, reward, reason, tuple(text[-_TAIL:] for text in seen), patch[:_TAIL])


def summary(record: Record, attacks: Sequence[Attack], tasks: TaskSet) -> dict[str, Any]:
    """The figures of an audit.

    Returns:
        attacks, tasks: counts. exploits: attacks on tasks that got a reward. ungraded: attacks without a verdict.
        attempts: attacks made. naive_exploits, naive_rewarded: how many and which attacks the naive grader rewards on
        some task. naive_gold, naive_noop, gold_pass, noop_pass, empty_pass, noise_pass, legitimate_pass: shares.
        legitimate: honest fixes made. by_attack, by_task: exploit rates. odd: of what should not be, "kind name task"
        -> reason, the first 20.
    """
    ids, names = {task.id for task in tasks.tasks}, [attack.name for attack in attacks]
    results = [r for r in record.results.values() if r.kind == "honest" or (r.task in ids)]
    attempts = [r for r in results if r.kind == "attack" and r.name in names]
    naive = {r.name for r in results if r.kind == "naive" and r.name in names and r.reward == 1.0}

    def share(kind: str, name: str | None = None) -> float | None:
        rows = [r for r in results if r.kind == kind and name in (None, r.name)]
        return sum(r.reward == 1.0 for r in rows) / len(rows) if rows else None

    def rate(rows: Sequence[Result]) -> float | None:
        return sum((r.reward or 0.0) > 0 for r in rows) / len(rows) if rows else None

    odd = [r for r in results if r.kind in ("attack", "honest", "check") and _is_odd(r)]
    return {
        "attacks": len(names),
        "tasks": len(ids),
        "exploits": sum((r.reward or 0.0) > 0 for r in attempts),
        "ungraded": sum(r.reward is None for r in attempts),
        "attempts": len(attempts),
        "naive_exploits": len(naive),
        "naive_gold": share("check", "naive_gold"),
        "naive_noop": share("check", "naive_noop"),
        "gold_pass": share("check", "gold"),
        "noop_pass": share("check", "noop"),
        "empty_pass": share("check", "empty"),
        "noise_pass": share("check", "noise"),
        "legitimate": sum(r.kind == "honest" for r in results),
        "legitimate_pass": share("honest"),
        "by_attack": {name: rate([r for r in attempts if r.name == name]) for name in names},
        "by_task": {task.id: rate([r for r in attempts if r.task == task.id]) for task in tasks.tasks},
        "naive_rewarded": sorted(naive),
        "odd": {f"{r.kind} {r.name} {r.task}": r.reason for r in odd[:20]},
    }


def _is_odd(result: Result) -> bool:
    if result.kind == "attack":
        return result.reward != 0.0
    wanted = 0.0 if result.name in ("noop", "empty", "naive_noop") else 1.0
    return result.reward != wanted


def holds(figures: dict[str, Any]) -> bool:
    """Whether nothing was exploited, and good work got its reward."""
    right = figures["gold_pass"] == figures["noise_pass"] == figures["legitimate_pass"] == 1.0
    return right and not figures["exploits"] and not figures["noop_pass"] and not figures["empty_pass"]


@asynccontextmanager
async def _pool(backend: str) -> Any:
    config = SandboxConfig.model_validate({"backend": backend})
    async with SandboxPool(config, "audit") as pool:
        yield pool, config


async def run_audit(
    name: str,
    *,
    backend: str,
    attacks: Sequence[str],
    limit: int,
    real_tasks: int,
    naive_tasks: int,
    directory: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Audit a task set on a backend.

    Args:
        name: "bundled", "micro" or a task-set file.
        backend: as `sandbox.backend`.
        attacks: names; empty takes all.
        limit: tasks.
        real_tasks: how many of them are bundled ones, where the set has them.
        naive_tasks: tasks on which the naive grader is tried.
        directory: where the record is kept, or taken up.
        progress: told of each result.

    Returns:
        As of `summary`.

    Raises:
        DeepsweError: an attack or a set is unknown, tasks cannot be built, or the backend cannot run here.
    """
    unknown = [attack for attack in attacks if attack not in ATTACKS]
    if unknown:
        raise ConfigError(f"there is no attack {unknown[0]!r}; there are {', '.join(ATTACKS)}")
    chosen = [ATTACKS[attack] for attack in attacks] or list(ATTACKS.values())
    tasks = await asyncio.to_thread(audit_tasks, name, limit, real_tasks, progress)
    with sole_writer(directory / RECORD):
        record = Record(directory)
        async with _pool(backend) as (pool, config):
            cache = LayerCache(default_cache_root(os.environ))
            check_runnable(tasks, backend, cache)
            workshop = Workshop(pool.open, cache.path, limits_of(config), {"run": "audit"})
            audit = Audit(tasks, workshop, record, concurrency=min(pool.concurrency, 2 * usable_cores()))
            await audit.run(chosen, naive_tasks, progress)
        return summary(record, chosen, tasks)
