from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from deepswe.config import AgentConfig, MicroTasks, SandboxConfig
from deepswe.envs.base import Environment, Outcome, Verdict
from deepswe.envs.solvers import no_op_solver
from deepswe.envs.swe import SweSuite
from deepswe.errors import SandboxStartError
from deepswe.grading.tree import Workshop
from deepswe.sandbox.base import Sandbox, SandboxSpec
from deepswe.sandbox.pool import SandboxPool, limits_of
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.synth.micro.solver import micro_solver
from deepswe.tasks.task import HiddenTests, Repository, Task, TaskSet
from deepswe.tools.calls import render_call
from deepswe.tools.catalog import TOOLS
from deepswe.types import Graded, ToolCall, Ungraded

SOURCE = "def double(x):\n    return x + 2\n"
TESTS = (
    "import unittest\nfrom pkg.shop import double\n\nclass A(unittest.TestCase):\n"
    "    def test_double(self):\n        self.assertEqual(double(5), 10)\n"
)
GOLD = (
    "diff --git a/pkg/shop.py b/pkg/shop.py\n--- a/pkg/shop.py\n+++ b/pkg/shop.py\n@@ -1,2 +1,2 @@\n"
    " def double(x):\n-    return x + 2\n+    return x * 2\n"
)
FILES = {"pkg/shop.py": SOURCE, "pkg/__init__.py": "", "README": "read\nme\n"}
BRIEF = AgentConfig(prompt="brief", step_timeout_s=10)


def one_task(base: str | None = None) -> TaskSet:
    """A set of one task; with a base layer, only the broken file is written over it."""
    repository = Repository(base=base, files=FILES if base is None else {"pkg/shop.py": SOURCE})
    if base is not None:
        repository = replace(repository, removed=("secret",))
    ids = ("tests/test_a.py::A::test_double",)
    hidden = HiddenTests("t", {"tests/test_a.py": TESTS}, ids, (), "unittest", gold_patch=GOLD)
    return TaskSet((Task("t", "r", "double is wrong", repository, "test", "train"),), {"t": hidden})


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    layers = tmp_path_factory.mktemp("layers")
    for path, text in {**FILES, "pkg/shop.py": "original = 1\n", "secret": "the answer"}.items():
        target = layers / "base" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    config = SandboxConfig()
    pool = SandboxPool(config, run="swe-tests")
    yield Workshop(pool.open, layers.joinpath, limits_of(config))
    asyncio.run(pool.close())


def bash(command: str) -> str:
    return render_call(ToolCall("execute_bash", {"cmd": command}), "xml", TOOLS)


async def act_all(environment: Environment, turns: list[str]) -> tuple[list[Outcome], Verdict]:
    try:
        await environment.start()
        outcomes = [await environment.act(turn, timeout_s=30) for turn in turns]
        return outcomes, await environment.finish()
    finally:
        await environment.close()


def attempt(workshop: Workshop, *turns: str, base: str | None = None) -> tuple[list[Outcome], Verdict]:
    """One attempt at the task with these turns."""
    tasks = one_task(base)
    suite = SweSuite(tasks, workshop, BRIEF)
    return asyncio.run(act_all(suite.open(tasks.tasks[0], seed=0), list(turns)))


async def solve(suite: SweSuite, task: Task, environment: Environment) -> tuple[list[str], list[str], Verdict]:
    """Let the reference solver act; its completions and the observations."""
    reference = suite.reference(task, seed=3)
    assert reference is not None
    said, seen = [next(reference)], [str(message) for message in await environment.start()]
    try:
        while not (outcome := await environment.act(said[-1], timeout_s=30)).done:
            assert outcome.error == "", outcome
            seen.append(outcome.observation)
            said.append(reference.send(outcome.observation))  # type: ignore[attr-defined]
        return said, seen, await environment.finish()
    finally:
        await environment.close()


@pytest.mark.parametrize("base", [None, "base"])
def test_the_gold_solver_solves_and_doing_nothing_does_not(workshop: Workshop, base: str | None) -> None:
    tasks = one_task(base)
    task = tasks.tasks[0]
    suite = SweSuite(tasks, workshop, BRIEF)
    _, _, verdict = asyncio.run(solve(suite, task, suite.open(task, seed=0)))
    assert verdict.grade == Graded(1.0, {"tests/test_a.py::A::test_double": "passed"})
    assert [line for line in verdict.artifact.split("\n") if line[:1] in "-+" and line] == [
        "--- a/pkg/shop.py", "+++ b/pkg/shop.py", "-    return x + 2", "+    return x * 2"
    ]  # fmt: skip
    idle = SweSuite(tasks, workshop, BRIEF, solver=no_op_solver)
    _, _, verdict = asyncio.run(solve(idle, task, idle.open(task, seed=0)))
    assert (verdict.artifact, verdict.grade.kind) == ("", "graded")
    assert isinstance(verdict.grade, Graded)
    assert verdict.grade.reward == 0


def test_rehearsals_of_micro_tasks_are_identical_to_real_attempts(workshop: Workshop) -> None:
    tasks = micro_task_set(MicroTasks(train=6, heldout=0, unseen=0, seed=1))

    def solver(task: Task, hidden: HiddenTests, seed: int) -> object:
        return micro_solver(task, hidden, seed=seed, mistakes=0.0)

    suite = SweSuite(tasks, workshop, BRIEF, solver=solver)  # type: ignore[arg-type]

    async def compare() -> None:
        for task in tasks.tasks:
            real = await solve(suite, task, suite.open(task, seed=0))
            rehearsed = await solve(suite, task, suite.rehearse(task, seed=0))
            assert real[:2] == rehearsed[:2]
            assert real[2].grade == Graded(
                1.0, dict.fromkeys(tasks.hidden[task.id].fail_to_pass + tasks.hidden[task.id].pass_to_pass, "passed")
            )
            assert isinstance(rehearsed[2].grade, Ungraded)

    asyncio.run(compare())


@pytest.mark.parametrize("base", [None, "base"])
def test_an_edit_of_the_same_size_right_after_the_start_is_in_the_diff(workshop: Workshop, base: str | None) -> None:
    for _ in range(3):
        _, verdict = attempt(workshop, bash("sed -i 's/^def /dEf /' pkg/shop.py"), base=base)
        assert "+dEf " in verdict.artifact


@pytest.mark.parametrize("base", [None, "base"])
def test_the_agent_starts_from_one_clean_commit_without_the_answer(workshop: Workshop, base: str | None) -> None:
    look = "git log --oneline --all | wc -l; git status --porcelain; git fsck 2>&1; find .git -name logs; cat README"
    outcomes, verdict = attempt(workshop, bash(look), bash("ls -a; git show --stat | grep -c secret"), base=base)
    assert outcomes[0].observation == "exit code 0\n1\nread\nme"
    assert "secret" not in outcomes[1].observation
    assert verdict.artifact == ""


@pytest.mark.parametrize("base", [None, "base"])
@pytest.mark.parametrize(
    "mischief",
    [
        "git add -A; git -c user.name=a commit -qam x; git checkout -q -b other",
        "echo '* -diff filter=x text' > .gitattributes; git config filter.x.clean 'echo gone'; rm .gitattributes",
        "git config diff.external /bin/true; git config core.worktree /tmp; git config core.fsmonitor /bin/false",
        "git update-index --assume-unchanged pkg/shop.py; git update-index --skip-worktree README",
        "printf '[core\\n' > .git/config; rm -f .git/index; echo junk > .git/HEAD",
        "printf '*.py\\n*.txt\\n' > .git/info/exclude; printf '* -diff\\n' > .git/info/attributes",
        "mkdir -p pkg/__pycache__; touch pkg/__pycache__/a.pyc b.pyc; python3 -c 'import pkg.shop'",
    ],
)
def test_the_diff_is_the_tree_whatever_was_done_to_git(workshop: Workshop, mischief: str, base: str | None) -> None:
    work = "sed -i 's/x + 2/x * 2/' pkg/shop.py; printf 'n\\r\\n' > new.txt; rm README"
    _, verdict = attempt(workshop, bash(work), bash(mischief), base=base)
    assert isinstance(verdict.grade, Graded)
    assert verdict.grade.reward == 1, verdict
    names = [line for line in verdict.artifact.split("\n") if line.startswith("diff --git")]
    assert [name.rpartition(" b/")[2] for name in names] == ["README", "new.txt", "pkg/shop.py"]
    assert "+n\r\n" in verdict.artifact


def test_a_removed_git_directory_is_no_loss_or_a_zero_with_its_reason(workshop: Workshop) -> None:
    work = bash("sed -i 's/x + 2/x * 2/' pkg/shop.py; rm -rf .git")
    _, verdict = attempt(workshop, work)
    assert isinstance(verdict.grade, Graded)
    assert verdict.grade.reward == 1
    _, verdict = attempt(workshop, work, base="base")
    assert isinstance(verdict.grade, Graded)
    assert verdict.grade.reward == 0
    assert "git cannot compare" in verdict.grade.reason


def test_binary_and_foreign_bytes_are_in_the_diff_and_apply(workshop: Workshop) -> None:
    work = "printf '\\000\\001' > a.bin; printf '# \\377\\n' > latin.py; sed -i 's/x + 2/x * 2/' pkg/shop.py"
    _, verdict = attempt(workshop, bash(work))
    assert isinstance(verdict.grade, Graded)
    assert verdict.grade.reward == 1
    assert verdict.artifact.count("GIT binary patch") >= 2
    verdict.artifact.encode()


def test_the_shell_keeps_its_state_and_a_timeout_keeps_the_state_before_it(workshop: Workshop) -> None:
    turns = ["cd pkg; a='x  y'; f() { echo \"f $1\"; }; export B=2; exit 3", 'pwd; echo "$a"; f 1; env | grep ^B=']
    turns += [
        "a=lost; sleep 60",
        'echo "$a"',
        "cat <<'E'\n$a\nE",
        "set -e; false; echo no",
        "set +e; echo $?",
    ]
    agent = replace_timeout(2.0)
    tasks = one_task()
    suite = SweSuite(tasks, workshop, agent)
    outcomes, _ = asyncio.run(act_all(suite.open(tasks.tasks[0], seed=0), [bash(turn) for turn in turns]))
    seen = [outcome.observation for outcome in outcomes]
    assert seen[:2] == ["exit code 3", "exit code 0\n/testbed/pkg\nx  y\nf 1\nB=2"]
    assert seen[2] == "stopped after 2 s, with everything it had started"
    assert outcomes[2].error == "command_timeout"
    assert seen[3:] == ["exit code 0\nx  y", "exit code 0\n$a", "exit code 1", "exit code 0\n0"]


def replace_timeout(seconds: float) -> AgentConfig:
    return BRIEF.model_copy(update={"step_timeout_s": seconds})


def test_mistakes_are_observations_that_say_what_to_do(workshop: Workshop) -> None:
    tasks = one_task()
    suite = SweSuite(tasks, workshop, BRIEF)
    turns = ["hello", "<function=fly></function>", f"{bash('echo hi')} and {bash('echo ho')}"]
    outcomes, _ = asyncio.run(act_all(suite.open(tasks.tasks[0], seed=0), turns))
    assert [outcome.error for outcome in outcomes] == ["no_call", "unknown_tool", "several_calls"]
    assert outcomes[1].observation.startswith("There is no tool 'fly'. The tools are execute_bash, search")
    assert outcomes[2].observation.startswith("exit code 0\nhi\nOnly the first call")


def test_full_prompts_describe_the_tools_and_brief_ones_are_the_issue(workshop: Workshop) -> None:
    tasks = one_task()

    async def first(agent: AgentConfig) -> list[tuple[str, str]]:
        environment = SweSuite(tasks, workshop, agent).rehearse(tasks.tasks[0], seed=0)
        return [(message.role, message.content) for message in await environment.start()]

    assert asyncio.run(first(BRIEF)) == [("user", "double is wrong")]
    (system, tools), (user, issue) = asyncio.run(first(AgentConfig()))
    assert (system, user) == ("system", "user")
    assert "double is wrong" in issue
    assert all(f"{tool.name}: " in tools for tool in TOOLS)


def test_equal_patches_share_one_test_run_and_failures_are_not_shared(workshop: Workshop) -> None:
    tasks = one_task()
    task = tasks.tasks[0]

    async def both(suite: SweSuite) -> list[object]:
        return list(await asyncio.gather(*(suite.grade(task, GOLD) for _ in range(3)), suite.grade(task, "")))

    suite = SweSuite(tasks, workshop, BRIEF)
    grades = asyncio.run(both(suite))
    assert grades[0] == grades[1] == grades[2] != grades[3]
    assert (suite.counts.runs, suite.counts.reuses) == (2, 2)

    @asynccontextmanager
    async def refuse(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        raise SandboxStartError("no room")
        yield

    broken = SweSuite(tasks, replace(workshop, open_sandbox=refuse), BRIEF)
    assert all(isinstance(grade, Ungraded) for grade in asyncio.run(both(broken)))
    assert (broken.counts.runs, broken.counts.reuses) == (4, 0)


def test_closing_before_the_start_and_twice_is_harmless(workshop: Workshop) -> None:
    tasks = one_task()

    async def close() -> None:
        environment = SweSuite(tasks, workshop, BRIEF).open(tasks.tasks[0], seed=0)
        await environment.close()
        await environment.close()

    asyncio.run(close())
