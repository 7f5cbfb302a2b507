"""Attempts at software-engineering tasks: a sandbox to work in, one diff, a grade from a sandbox of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from deepswe.config import AgentConfig
from deepswe.envs.base import Environment, Outcome, Verdict
from deepswe.envs.prompts import opening_messages
from deepswe.envs.snapshot import DiffRefused, Snapshot, commit_tree, git_directory, make_diff, snapshot_of
from deepswe.envs.solvers import Solver, gold_solver
from deepswe.errors import EnvironmentFault, TaskError, boundary
from deepswe.grading.grade import grade
from deepswe.grading.tree import ROOT, Workshop, lay_tree, prepare_image
from deepswe.sandbox.base import Sandbox
from deepswe.sandbox.memory import MemorySandbox
from deepswe.tasks.task import HiddenTests, Task, TaskSet
from deepswe.tools.calls import parse_call, render_call, run_call
from deepswe.tools.catalog import TOOLS
from deepswe.tools.declare import Workspace
from deepswe.types import Grade, Graded, Message, ToolCall, Ungraded

Grader = Callable[[str], Awaitable[Grade]]
_ONE_CALL = "Only the first call of a turn is carried out."
_LEAST_TIMEOUT_S = 0.1


class SweEnv:
    """One attempt. See `deepswe.envs.base.Environment`."""

    def __init__(self, task: Task, workshop: Workshop, agent: AgentConfig, grader: Grader) -> None:
        """Prepare; nothing is acquired before `start`.

        Args:
            task: the public part of the task. The hidden tests are the grader's.
            workshop: where sandboxes come from.
            agent: prompt, call format and the time of one call.
            grader: gives a diff its grade.
        """
        self._task = task
        self._workshop = workshop
        self._agent = agent
        self._grader = grader
        self._stack = AsyncExitStack()
        self._workspace: Workspace | None = None
        self._snapshot: Snapshot | None = None

    async def start(self) -> Sequence[Message]:
        """Open the sandbox, lay the tree, commit it."""
        with boundary("env.start", EnvironmentFault):
            sandbox = await self._stack.enter_async_context(self._workshop.open(self._task, "attempt"))
            self._snapshot = await _lay_and_commit(sandbox, self._task)
            self._workspace = Workspace(sandbox, ROOT)
        return opening_messages(self._task.problem_statement, self._agent, TOOLS, ROOT)

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        """Carry out the first call of a turn."""
        if self._workspace is None:
            raise EnvironmentFault("act was called before start, or after finish")
        with boundary("env.act", EnvironmentFault):
            self._workspace.timeout_s = max(_LEAST_TIMEOUT_S, min(self._agent.step_timeout_s, timeout_s))
            return await take_turn(self._workspace, completion, self._agent)

    async def finish(self) -> Verdict:
        """Make the diff, end the sandbox, grade the diff."""
        if self._workspace is None or self._snapshot is None:
            raise EnvironmentFault("finish was called before start, or twice")
        sandbox, self._workspace = self._workspace.sandbox, None
        with boundary("env.diff", EnvironmentFault):
            try:
                patch = await make_diff(sandbox, self._snapshot)
            except DiffRefused as error:
                return Verdict(Graded(0.0, reason=str(error)))
        await self.close()
        return Verdict(await self._grader(patch), patch)

    async def close(self) -> None:
        """End the sandbox."""
        self._workspace = None
        await self._stack.aclose()


class Rehearsal:
    """An attempt in memory, without commands and without a grade: to record imitation trajectories fast."""

    def __init__(self, task: Task, agent: AgentConfig) -> None:
        """Prepare.

        Args:
            task: a task without a base layer.
            agent: as for the real attempt.

        Raises:
            TaskError: the task has a base layer, which is not in memory.
        """
        if task.repository.base is not None or task.image is not None:
            place = f"the base layer {task.repository.base}" if task.image is None else f"the image {task.image.name}"
            raise TaskError(f"task {task.id} has {place}; rehearse tasks without one")
        self._task = task
        self._agent = agent
        files = {f"{ROOT}/{path}": text.encode() for path, text in task.repository.files.items()}
        self._workspace = Workspace(MemorySandbox(files), ROOT)

    async def start(self) -> Sequence[Message]:
        """The opening messages."""
        return opening_messages(self._task.problem_statement, self._agent, TOOLS, ROOT)

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        """Carry out the first call of a turn."""
        return await take_turn(self._workspace, completion, self._agent)

    async def finish(self) -> Verdict:
        """No grade: nothing was tested."""
        return Verdict(Ungraded("a rehearsal is not graded", "env.rehearsal"))

    async def close(self) -> None:
        """Nothing to release."""


async def take_turn(workspace: Workspace, completion: str, agent: AgentConfig) -> Outcome:
    """Read the first call of a turn and carry it out.

    Raises:
        SandboxError: the sandbox itself failed.
    """
    parsed = parse_call(completion, agent.format)
    if parsed.call is None:
        mistake = parsed.mistake
        return Outcome(mistake.text if mistake else "", error=mistake.error if mistake else "no_call")
    result = await run_call(workspace, parsed.call, TOOLS)
    if parsed.extra and not result.done:
        return Outcome(f"{result.text}\n{_ONE_CALL}", call=parsed.call, error=result.error or "several_calls")
    return Outcome(result.text, result.done, parsed.call, result.error)


async def _lay_and_commit(sandbox: Sandbox, task: Task) -> Snapshot:
    if task.image is not None:
        await prepare_image(sandbox, task.image, for_agent=True)
    elif task.repository.base is None:
        snapshot = snapshot_of(tuple(task.repository.files.items()))
        await lay_tree(sandbox, task.repository, git_directory(snapshot))
        return snapshot
    await lay_tree(sandbox, task.repository)
    return await commit_tree(sandbox)


def completions(calls: Generator[ToolCall, str, None], agent: AgentConfig) -> Generator[str, str, None]:
    """A script's calls as the turns of an agent; each observation goes back to the script."""
    try:
        call = next(calls)
        while True:
            observation = yield render_call(call, agent.format, TOOLS)
            call = calls.send(observation)
    except StopIteration:
        return


@dataclass(slots=True)
class GradingCounts:
    """How verdicts came about.

    Attributes:
        runs: test runs in a sandbox.
        reuses: verdicts taken from an earlier run of the same patch on the same task.
    """

    runs: int = 0
    reuses: int = 0


class SweSuite:
    """Tasks with hidden tests. See `deepswe.envs.base.Suite`."""

    def __init__(
        self,
        tasks: TaskSet,
        workshop: Workshop,
        agent: AgentConfig,
        *,
        solver: Solver | None = gold_solver,
        reuse_verdicts: bool = True,
    ) -> None:
        """Gather what attempts need.

        Args:
            tasks: tasks and hidden tests.
            workshop: where sandboxes come from.
            agent: prompt, call format and the time of one call.
            solver: the reference solver; None if there is none.
            reuse_verdicts: grade a patch that was already graded on the same task, in this process, by that verdict.
        """
        self.tasks = tasks
        self.counts = GradingCounts()
        self.workshop = workshop
        self._agent = agent
        self._solver = solver
        self._reuse = reuse_verdicts
        self._verdicts: dict[tuple[str, bytes], Graded] = {}
        self._grading: dict[tuple[str, bytes], asyncio.Event] = {}

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of a split, in order."""
        return self.tasks.split(name)

    def open(self, task: Task, *, seed: int) -> Environment:
        """A new attempt. The seed changes nothing: the tree of a task is always the same."""

        async def grader(patch: str) -> Grade:
            return await self.grade(task, patch)

        return SweEnv(task, self.workshop, self._agent, grader)

    def rehearse(self, task: Task, *, seed: int) -> Environment:
        """A new attempt in memory, not graded; for tasks without a base layer whose solver runs no commands."""
        return Rehearsal(task, self._agent)

    def corpus(self) -> Iterator[str]:
        """The issues and the files of the training tasks."""
        for task in self.split("train"):
            yield task.problem_statement
            yield from task.repository.files.values()

    def reference(self, task: Task, *, seed: int) -> Iterator[str] | None:
        """The reference solver's completions; a generator that is sent each observation."""
        if self._solver is None:
            return None
        return completions(self._solver(task, self._hidden(task), seed), self._agent)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The declarations of the agent's tools."""
        return [tool.schema() for tool in TOOLS]

    def describe(self, task: Task) -> Mapping[str, str]:
        """What reports group by, and the issue, which other readers of the trajectories need."""
        return {
            "repo": task.repo,
            "kind": task.kind,
            "source": task.source,
            "split": task.split,
            **task.tags,
            "issue": task.problem_statement,
        }

    def _hidden(self, task: Task) -> HiddenTests:
        if task.id not in self.tasks.hidden:
            raise TaskError(f"task {task.id} has no hidden tests in this set; it cannot be graded")
        return self.tasks.hidden[task.id]

    async def grade(self, task: Task, patch: str) -> Grade:
        """Grade a patch, or reuse the verdict on the same patch. Failures of the infrastructure are never reused."""
        hidden = self._hidden(task)
        key = (task.id, hashlib.sha256(patch.encode("utf-8", "surrogateescape")).digest())
        while self._reuse and key in self._grading:
            await self._grading[key].wait()
        if self._reuse and key in self._verdicts:
            self.counts.reuses += 1
            return self._verdicts[key]
        self.counts.runs += 1
        if not self._reuse:
            return await grade(patch, task, hidden, self.workshop)
        self._grading[key] = asyncio.Event()
        try:
            verdict = await grade(patch, task, hidden, self.workshop)
            if isinstance(verdict, Graded):
                self._verdicts[key] = verdict
        finally:
            self._grading.pop(key).set()
        return verdict
