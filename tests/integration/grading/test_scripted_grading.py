"""Tasks of an image, from the agent's first look to the verdict of the source's own script.

The image is played by the local backend: the workshop drops its name, and its setup makes what the image would hold.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from deepswe.config import AgentConfig
from deepswe.envs.swe import SweEnv, SweSuite
from deepswe.grading.grade import grade
from deepswe.grading.tree import Workshop
from deepswe.sandbox.base import Sandbox, SandboxSpec
from deepswe.tasks.patches import diff_files, reverse_patch
from deepswe.tasks.sources_harbor import harbor_rows, harbor_task
from deepswe.tasks.task import HiddenTests, Image, Repository, Task, TaskSet
from deepswe.types import Graded, Ungraded

RIGHT = "def add(a, b):\n    return a + b\n"
BUG = diff_files(RIGHT, RIGHT.replace("+", "-"), "calc.py")
GOLD = reverse_patch(BUG)
TESTS = """import calc
for name, right in (("one", calc.add(1, 2) == 3), ("zero", calc.add(0, 0) == 0)):
    print("PASSED" if right else "FAILED", f"t.py::test_{name}")
"""
SETUP = f"""mkdir -p /testbed && cd /testbed
git init -q . && printf '%s' '{RIGHT}' > calc.py
git -c user.name=a -c user.email=a@b add . && git -c user.name=a -c user.email=a@b commit -qm secret-history
mkdir -p secret && echo answer > secret/key
"""
SCRIPT = ": '>>>>> Start Test Output'\nset -x; : '>>>>> Start Test Output'\npython3 t.py\n: '>>>>> End Test Output'\n"


@pytest.fixture
def imaged(workshop: Workshop) -> Workshop:
    def open_sandbox(spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return workshop.open_sandbox(replace(spec, image=""))

    return replace(workshop, open_sandbox=open_sandbox)


def make(**more: object) -> tuple[Task, HiddenTests]:
    image = Image("registry/tool:1", setup=SETUP, patch=BUG, hide=("/testbed/secret",))
    task = Task("t", "acme/tool", "add is wrong", Repository(), "own", "train", image=image)
    hidden = HiddenTests(
        "t",
        {},
        ("t.py::test_one",),
        ("t.py::test_zero",),
        "script",
        timeout_s=20.0,
        script=SCRIPT,
        parser="pytest",
        gold_patch=GOLD,
        test_patch=diff_files("", TESTS, "t.py"),
        protected=("t.py",),
    )
    return task, replace(hidden, **more)  # type: ignore[arg-type]


def test_the_gold_patch_passes_and_nothing_fails(imaged: Workshop) -> None:
    task, hidden = make()

    async def both() -> None:
        gold = await grade(GOLD, task, hidden, imaged)
        assert isinstance(gold, Graded), gold
        assert (gold.reward, dict(gold.statuses)) == (1.0, dict.fromkeys(hidden.tests, "passed"))
        noop = await grade("", task, hidden, imaged)
        assert isinstance(noop, Graded), noop
        assert (noop.reward, noop.statuses["t.py::test_one"]) == (0.0, "failed")

    asyncio.run(both())


def test_a_patch_of_the_test_file_is_left_out(imaged: Workshop) -> None:
    forged = GOLD.replace("a + b", "0") + diff_files("", "print('PASSED t.py::test_one')\n", "t.py")

    async def run() -> None:
        verdict = await grade(forged, *make(), imaged)
        assert isinstance(verdict, Graded), verdict
        assert verdict.reward == 0.0

    asyncio.run(run())


def test_a_timeout_is_a_verdict_and_a_script_that_does_not_run_is_none(imaged: Workshop) -> None:
    async def run() -> None:
        slow = await grade(GOLD, *make(script="sleep 60", timeout_s=1.0), imaged)
        assert isinstance(slow, Graded)
        assert "more than 1 s" in slow.reason
        absent = await grade(GOLD, *make(script="no-such-program"), imaged)
        assert isinstance(absent, Ungraded)
        broken = await grade(GOLD, *make(test_patch=diff_files("x\n", "y\n", "absent.py")), imaged)
        assert isinstance(broken, Ungraded)
        assert "hidden tests do not apply" in broken.error

    asyncio.run(run())


def test_the_agent_finds_neither_history_nor_hidden_paths_nor_the_bugs_patch(imaged: Workshop) -> None:
    task, hidden = make()

    async def look() -> None:
        suite = SweSuite(TaskSet((task,), {"t": hidden}), imaged, AgentConfig())
        env = suite.open(task, seed=0)
        assert isinstance(env, SweEnv)
        try:
            await env.start()
            command = (
                "cd /testbed; ls; cat calc.py; git log --oneline | wc -l; git log; grep -rl secret-history . ; ls /tmp"
            )
            said = (
                await env.act(f"<function=execute_bash><parameter=cmd>{command}</parameter></function>", timeout_s=20)
            ).observation
            assert "a - b" in said
            assert "secret" not in said
            assert "\n1\n" in said
            assert ".diff" not in said
        finally:
            await env.close()

    asyncio.run(look())


def test_harbors_verifier_decides(imaged: Workshop, tmp_path: Path) -> None:
    files = {
        "task.toml": "",
        "instruction.md": "Write done.",
        "environment/Dockerfile": "FROM x\nWORKDIR /testbed\n",
        "tests/test.sh": "cd /logs/verifier; [ -f /testbed/done ] && echo 1 > reward.txt || echo 0 > reward.txt\n",
    }
    for name, text in files.items():
        (tmp_path / "job" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "job" / name).write_text(text)
    (row,) = harbor_rows(tmp_path)
    task, hidden = harbor_task(row)
    # The local backend's root cannot be written to; an image's can.
    moved = {
        path.replace("/tests/", "/tmp/tests/"): text.replace("/logs", "/tmp/logs")
        for path, text in hidden.files.items()
    }
    script = hidden.script.replace("/tests/", "/tmp/tests/").replace("/logs", "/tmp/logs")
    hidden = replace(hidden, files=moved, script=script)

    async def run() -> None:
        done = await grade(diff_files("", "x\n", "done"), task, hidden, imaged)
        assert isinstance(done, Graded), done
        assert done.reward == 1.0
        noop = await grade("", task, hidden, imaged)
        assert isinstance(noop, Graded), noop
        assert noop.reward == 0.0

    asyncio.run(run())
