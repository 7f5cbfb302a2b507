"""A small real environment for the tests of the loop: guess a number; every failure can be asked for."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deepswe.envs.base import Environment, Outcome, Verdict
from deepswe.errors import SandboxDied
from deepswe.types import Graded, Message, Ungraded


@dataclass(frozen=True)
class Number:
    id: str
    value: int = 7


@dataclass
class Guessing:
    """The attempt is over when the number is said; `log` records what the environment went through."""

    task: Number
    fail_in: str = ""
    slow_s: float = 0.0
    log: list[str] = field(default_factory=list)
    solved: bool = False

    async def start(self) -> Sequence[Message]:
        self.log.append("start")
        self._fail("start")
        return [Message("user", "guess")]

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        self.log.append(f"act {completion}")
        self._fail("act")
        await asyncio.sleep(min(self.slow_s, timeout_s))
        self.solved = completion == str(self.task.value)
        return Outcome("too low", done=self.solved)

    async def finish(self) -> Verdict:
        self.log.append("finish")
        self._fail("finish")
        if self.fail_in == "grading":
            return Verdict(Ungraded("no grader", "grading"))
        return Verdict(Graded(float(self.solved)), "patch")

    async def close(self) -> None:
        self.log.append("close")

    def _fail(self, where: str) -> None:
        if self.fail_in == where:
            raise SandboxDied(f"died in {where}")
        if self.fail_in == f"bug in {where}":
            raise KeyError(where)


@dataclass
class GuessingSuite:
    """`fails` names, for each task, in which opening of it something fails."""

    tasks: tuple[Number, ...]
    fails: Mapping[str, Sequence[str]] = field(default_factory=dict)
    opened: list[Guessing] = field(default_factory=list)

    def split(self, name: str) -> Sequence[Number]:
        return self.tasks

    def open(self, task: Number, *, seed: int) -> Environment:
        before = sum(env.task.id == task.id for env in self.opened)
        plan = self.fails.get(task.id, ())
        env = Guessing(task, fail_in=plan[before] if before < len(plan) else "")
        self.opened.append(env)
        return env

    def rehearse(self, task: Number, *, seed: int) -> Environment:
        return Guessing(task)

    def corpus(self) -> Iterator[str]:
        yield "guess"

    def reference(self, task: Number, *, seed: int) -> Iterator[str] | None:
        return iter([str(task.value)])

    def describe(self, task: Number) -> Mapping[str, str]:
        return {}
