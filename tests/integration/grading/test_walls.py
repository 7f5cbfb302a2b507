"""What code under test cannot reach: the reporter, its nonce, its channel."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from deepswe.config import SandboxConfig
from deepswe.grading.run import RUN_ENVIRONMENT, runner_command, runner_input
from deepswe.sandbox.base import ExecResult, SandboxSpec
from deepswe.sandbox.pool import SandboxPool
from deepswe.tasks.task import Repository, Task

TASK = Task("t", "r", "", Repository(), "test", "train")
NONCE = "5eed5eed5eed5eed"
PROBE = """import gc, json, os, signal, sys, unittest

def trying(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return error.strerror
    return "done"

parent = os.getppid()
found = {
    "kill": trying(os.kill, parent, signal.SIGKILL),
    "stop": trying(os.kill, parent, signal.SIGSTOP),
    "group": trying(os.killpg, parent, signal.SIGKILL),
    "all": trying(os.kill, -1, signal.SIGKILL),
    "memory": trying(open, "/proc/%d/mem" % parent, "rb"),
    "channel": trying(open, "/proc/%d/fd/3" % parent, "wb"),
    "input": trying(open, "/proc/%d/fd/0" % parent, "rb"),
    "environment": trying(open, "/proc/%d/environ" % parent, "rb"),
    "own": trying(open, "/proc/self/environ", "rb"),
    "stdin": os.read(0, 100).decode(),
    "open": [name for name in os.listdir("/proc/self/fd") if int(name) > 2],
}
child = os.fork()
if child == 0:
    signal.pause()
found["child"] = trying(os.kill, child, signal.SIGKILL)
os.waitpid(child, 0)
texts = [str(o) for o in gc.get_objects() if isinstance(o, (list, tuple, dict)) and len(o) < 50]
frame, held = sys._getframe(), []
while frame:
    held.append(repr(frame.f_locals) + repr(list(frame.f_globals)))
    frame = frame.f_back
found["nonce"] = "".join(["5e", "ed"] * 3) in "".join(texts + held)
open("/tmp/found.json", "w").write(json.dumps(found))

class A(unittest.TestCase):
    def test_a(self):
        pass
"""


async def probe() -> tuple[ExecResult, dict[str, object]]:
    async with SandboxPool(SandboxConfig(), "walls") as pool, pool.open(SandboxSpec()) as sandbox:
        await sandbox.write_files({"/testbed/test_a.py": PROBE.encode()})
        result = await sandbox.exec(
            runner_command(TASK),
            timeout_s=30,
            env=RUN_ENVIRONMENT,
            stdin=runner_input(NONCE, "unittest", TASK, (), ["test_a.py::A::test_a"]),
            channel=True,
        )
        return result, json.loads(await sandbox.read_file("/tmp/found.json"))


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_code_under_test_reaches_neither_reporter_nor_nonce() -> None:
    result, found = asyncio.run(probe())
    assert result.channel.decode().startswith(f"{NONCE} 0 begin ok - {b'guarded'.hex()}\n")
    assert result.channel.decode().endswith(" end ok - -\n")
    refused = "Operation not permitted"
    assert [found[name] for name in ("kill", "stop", "group", "all")] == [refused] * 4
    assert [found[name] for name in ("memory", "channel", "input", "environment")] == ["Permission denied"] * 4
    assert (found["own"], found["child"], found["stdin"], found["nonce"]) == ("done", "done", "", False)
    assert len(found["open"]) <= 2  # type: ignore[arg-type]
