"""What the rollout loop itself costs: 1,000 attempts of 30 turns, a scripted policy, a sandbox that does nothing.

The scheduler, the agent loop, the environment of software-engineering tasks, the four tools and their parsing, the
renderer and the record on disk are the real ones; the policy plays a script and the sandbox answers at once out of
memory, so what is left is ours. The peer is the least that could play the same turns: a loop around the same policy,
renderer and environment without deadlines, error boundaries, records and a store. Prints one JSON object as its last
line:

- `ours`, `peer`: steps a second of one core (of CPU time, since other work may share the machine); `ratio`: ours over
  peer; `repeats`: of each, in turns; the medians count
- `wall_steps_per_s`: ours by the clock; `step_ms`: CPU milliseconds a step; `overhead_ms`: of these, what the peer does
  not take
- `attempts`, `turns`, `concurrency`
- `rss_growth_mib`: resident memory at the end of the last run over that after its first tenth

Exits 0 only where ours is at least 2,000, `overhead_ms` below 0.5 and `rss_growth_mib` below 32.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deepswe.config import AgentConfig, RolloutConfig
from deepswe.envs.base import Suite
from deepswe.envs.swe import SweEnv
from deepswe.grading.tree import Workshop
from deepswe.policy.base import Sampling
from deepswe.policy.scripted import ByteRenderer, ScriptedPolicy
from deepswe.rollout.scheduler import Batch, Scheduler
from deepswe.rollout.store import TrajectoryStore
from deepswe.sandbox.base import ExecResult, Sandbox, SandboxSpec
from deepswe.sandbox.memory import MemorySandbox
from deepswe.tasks.task import Repository, Task
from deepswe.tools.calls import render_call
from deepswe.tools.catalog import TOOLS
from deepswe.types import Grade, Graded, ToolCall, Trajectory

TURNS = 30
LEAST_STEPS_PER_S, MOST_OVERHEAD_MS, MOST_GROWTH_MIB = 2000.0, 0.5, 32.0
SOURCE = "".join(
    f'def clamp_{n}(value, low={n}, high={n + 10}):\n    """Keep a value between two others."""\n'
    f"    if value < low:\n        return low\n    return min(value, high)\n\n\n"
    for n in range(12)
)
FILES = {"calc/clamp.py": SOURCE, "calc/__init__.py": "", "tests/test_clamp.py": "def test_clamp():\n    pass\n"}
OUTPUT = b"".join(b"tests/test_clamp.py::test_%d PASSED  [%3d%%]\n" % (n, 4 * n) for n in range(25))
PATCH = (
    b"diff --git a/calc/clamp.py b/calc/clamp.py\n--- a/calc/clamp.py\n+++ b/calc/clamp.py\n"
    b"@@ -3,1 +3,1 @@\n-    if value < low:\n+    if value <= low:\n"
)
ROLLOUT = RolloutConfig(max_steps=TURNS, max_tokens=1 << 20, max_turn_tokens=1 << 16)
AGENT = AgentConfig()


class NullSandbox(MemorySandbox):
    """Answers every command with the same words."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        channel: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> ExecResult:
        return ExecResult(0, b"" if argv[0] == "sh" else OUTPUT, b"", channel=PATCH if argv[0] == "sh" else b"")


@asynccontextmanager
async def open_null(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    yield NullSandbox()


async def grade_nothing(patch: str) -> Grade:
    return Graded(1.0, {"tests/test_clamp.py::test_clamp": "passed"})


class NullSuite(Suite):
    """Real environments in sandboxes that do nothing, without a test run."""

    workshop = Workshop(open_null, lambda key: Path(key))

    def split(self, name: str) -> Sequence[Task]:
        return tasks(8)

    def open(self, task: Task, *, seed: int) -> SweEnv:
        return SweEnv(task, self.workshop, AGENT, grade_nothing)


def tasks(count: int) -> tuple[Task, ...]:
    return tuple(
        Task(f"null-{n:04d}", "null", "clamp returns the wrong bound.", Repository(files=FILES), "null", "train")
        for n in range(count)
    )


def turns() -> list[str]:
    """The script: look, search, edit and run, thirty times, and submit."""
    calls = [
        ToolCall("file_editor", {"command": "view", "path": "calc/clamp.py", "view_range": "[1, 40]"}),
        ToolCall("search", {"search_term": "return low", "path": "calc"}),
        ToolCall("execute_bash", {"cmd": "python -m pytest -q tests/test_clamp.py"}),
        ToolCall("file_editor", {"command": "create", "path": "calc/note.py", "file_text": "LOW = 1\n"}),
        ToolCall("file_editor", {"command": "view", "path": "."}),
    ]
    thought = "The bound looks wrong where the value equals the lower one, so I look at it again.\n"
    script = [thought + render_call(calls[n % len(calls)], AGENT.format, TOOLS) for n in range(TURNS - 1)]
    return [*script, "Done.\n" + render_call(ToolCall("finish", {}), AGENT.format, TOOLS)]


SCRIPT = turns()


def play(name: str) -> Iterator[str]:
    return iter(SCRIPT)


@dataclass(slots=True)
class Watch:
    """What is seen while a run goes on."""

    rss_mib: list[float] = field(default_factory=list)

    def look(self) -> None:
        self.rss_mib.append(psutil.Process().memory_info().rss / 2**20)


async def ours(attempts: int, concurrency: int, directory: Path, watch: Watch) -> int:
    """Steps of all attempts, in batches as training makes them; each is recorded and let go."""
    renderer = ByteRenderer()
    policy, limits = ScriptedPolicy(renderer, play), {"rollout": ROLLOUT, "agent": AGENT}
    scheduler = Scheduler(NullSuite(), policy, renderer, **limits, concurrency=concurrency, seed=0)
    store, steps = TrajectoryStore(directory), 0
    for number, size in enumerate([attempts // 10] * 10):
        segment, _ = store.begin("train", number, keep=False)
        with segment:
            done = await scheduler.collect(Batch("train", number, tasks(size), 1, 1.0), record=segment.append)
            segment.commit()
        steps += sum(len(t.steps) for t in done)
        check(done)
        del done
        watch.look()
    return steps


def check(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        if trajectory.reward != 1.0 or len(trajectory.steps) != TURNS or any(step.error for step in trajectory.steps):
            raise RuntimeError(f"{trajectory.key} went wrong: {trajectory.ending} {trajectory.error}")


async def bare(attempts: int) -> int:
    """The same turns in a plain loop."""
    renderer, suite, steps = ByteRenderer(), NullSuite(), 0
    policy = ScriptedPolicy(renderer, play)
    for task in tasks(attempts):
        env = suite.open(task, seed=0)
        stream = list(renderer.opening(await env.start()))
        for turn in range(TURNS):
            sampling = Sampling(1 << 16, 1.0, renderer.stop_tokens, turn)
            completion = await policy.generate(task.id, stream, sampling, timeout_s=90.0)
            stream += completion.tokens
            outcome = await env.act(renderer.decode(completion.tokens), timeout_s=90.0)
            steps += 1
            if outcome.done:
                break
            stream += renderer.observation(outcome.observation)
        await policy.release(task.id)
        await env.finish()
        await env.close()
    return steps


def measure(attempts: int, concurrency: int, repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = {"ours": [], "peer": [], "wall": []}
    watch = Watch()
    for _ in range(repeats):
        watch = Watch()
        gc.collect()
        with tempfile.TemporaryDirectory(prefix="deepswe-rollout-loop-") as scratch:
            begun, cpu = time.perf_counter(), time.process_time()
            steps = asyncio.run(ours(attempts, concurrency, Path(scratch), watch))
            found["ours"].append(steps / (time.process_time() - cpu))
            found["wall"].append(steps / (time.perf_counter() - begun))
        cpu = time.process_time()
        steps = asyncio.run(bare(attempts))
        found["peer"].append(steps / (time.process_time() - cpu))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {**medians, "growth": watch.rss_mib[-1] - watch.rss_mib[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="200 attempts instead of 1,000, and 3 repeats instead of 5"
    )
    parser.add_argument("--concurrency", type=int, default=64, help="attempts in flight at once")
    arguments = parser.parse_args()
    attempts, repeats = (100, 3) if arguments.quick else (1000, 5)
    found = measure(attempts, arguments.concurrency, repeats)
    overhead_ms = 1000 / found["ours"] - 1000 / found["peer"]
    row = {
        "ours": round(found["ours"]),
        "peer": round(found["peer"]),
        "ratio": round(found["ours"] / found["peer"], 3),
        "repeats": repeats,
        "wall_steps_per_s": round(found["wall"]),
        "step_ms": round(1000 / found["ours"], 4),
        "overhead_ms": round(overhead_ms, 4),
        "attempts": attempts,
        "turns": TURNS,
        "concurrency": arguments.concurrency,
        "rss_growth_mib": round(found["growth"], 1),
    }
    print(json.dumps(row))
    fast = found["ours"] >= LEAST_STEPS_PER_S and overhead_ms < MOST_OVERHEAD_MS
    return 0 if fast and found["growth"] < MOST_GROWTH_MIB else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
