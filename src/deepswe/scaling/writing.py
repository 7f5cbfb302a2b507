"""Attempts at writing tests: the same agent loop, sandbox and tools, another prompt, and test modules as the result.

The reward is 1 if one of the tests fails on the base as it must, so a writer can be trained like any other agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepswe.config import AgentConfig
from deepswe.envs.base import Environment, Outcome, SuiteAround, Verdict
from deepswe.envs.swe import SweEnv, SweSuite, completions
from deepswe.grading.tree import ROOT
from deepswe.scaling.checks import Written, read_written, runner_of, settle_checks
from deepswe.scaling.writing_script import write_by_script
from deepswe.tasks.task import Task
from deepswe.tools.calls import document_calls
from deepswe.tools.catalog import TOOLS
from deepswe.types import Grade, Graded, Message, Ungraded

_ROLE = """You are a test engineer. You work on a repository in {root} through tools. The user gives you an issue that \
is not resolved yet. You write tests by which a fix can be told from a wrong one, and then submit them.{tools}

Reminders:
- Think first, then make exactly one call in each turn. Only the first call of a turn counts.
- The answer to your call comes in the next message. Wait for it.
- When you are done, call finish. Work that is not submitted does not count."""

_TASK = """The repository in {root} has this issue:

<issue>
{issue}
</issue>

Write tests for it.

- Do not resolve the issue. Add new files named test_*.py, and change no other file.
- Write ten or more test cases, for {runner}: the case of the issue, its edges, and what must stay as it is.
- At least one must fail now, because of the issue, and pass once it is resolved. Run them to see that they do.
- A test must give the same result each time, and import only what is installed. There is no network."""


def writing_messages(task: Task, agent: AgentConfig) -> list[Message]:
    """The messages that start an attempt; with `agent.prompt` "brief" one with the issue and what is wanted."""
    if agent.prompt == "brief":
        return [Message("user", f"{task.problem_statement}\nWrite tests in test_*.py that fail because of it.")]
    tools = "" if agent.format == "native" else "\n\n" + document_calls(TOOLS, agent.format)
    said = _TASK.format(root=ROOT, issue=task.problem_statement, runner=runner_of(task))
    return [Message("system", _ROLE.format(root=ROOT, tools=tools)), Message("user", said)]


class WritingEnv:
    """One attempt at writing tests. See `deepswe.envs.base.Environment`."""

    def __init__(self, inner: SweEnv, task: Task, agent: AgentConfig) -> None:
        """Args:
        inner: the same attempt at the task itself, whose grader judges tests.
        task, agent: what is asked, and how.
        """
        self._inner, self._task, self._agent = inner, task, agent

    async def start(self) -> Sequence[Message]:
        """Open the sandbox; say what is wanted."""
        await self._inner.start()
        return writing_messages(self._task, self._agent)

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        """Carry out the first call of a turn."""
        return await self._inner.act(completion, timeout_s=timeout_s)

    async def finish(self) -> Verdict:
        """Make the diff, end the sandbox, try the tests on the base."""
        return await self._inner.finish()

    async def close(self) -> None:
        """End the sandbox."""
        await self._inner.close()


class WritingSuite(SuiteAround):
    """The tasks of a suite, to write tests for. See `deepswe.envs.base.Suite`. No hidden test is looked at."""

    def __init__(self, inner: SweSuite, agent: AgentConfig) -> None:
        """Args:
        inner: knows the tasks and where sandboxes come from.
        agent: prompt, call format and the time of one call.
        """
        super().__init__(inner)
        self._workshop, self._agent = inner.workshop, agent

    def open(self, task: Task, *, seed: int) -> Environment:
        """A new attempt. The seed changes nothing."""

        async def grader(patch: str) -> Grade:
            return await self.judge(task, patch)

        return WritingEnv(SweEnv(task, self._workshop, self._agent, grader), task, self._agent)

    def rehearse(self, task: Task, *, seed: int) -> Environment:
        """The same as `open`: tests are worth what they do in a sandbox."""
        return self.open(task, seed=seed)

    async def judge(self, task: Task, patch: str) -> Grade:
        """1 if a test that the patch adds fails on the base; the statuses are those of the tests that may be kept."""
        try:
            written = read_written(patch, runner_of(task))
        except ValueError as error:
            return Graded(0.0, reason=str(error))
        checks = await settle_checks(task, written, Written(), self._workshop, runs=1)
        if isinstance(checks, Ungraded):
            return checks
        reason = "" if checks.generated else "; ".join(sorted(set(checks.dropped.values())))
        return Graded(float(bool(checks.generated)), dict(checks.generated), reason)

    def reference(self, task: Task, *, seed: int) -> Iterator[str] | None:
        """The scripted writer; it knows the public part of the task and what its calls answer."""
        return completions(write_by_script(task), self._agent)
