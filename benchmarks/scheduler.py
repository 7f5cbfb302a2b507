"""Asynchronous over synchronous rollouts in virtual time, and 16,000 attempts in flight in real time.

The first half simulates the recipe's own loop, scheduler and pool at the shape of the DeepSWE run (64 tasks x 8
attempts a step, 64 GPUs, heavy tails; `deepswe.simulate.profile.Profile`): synchronous with all GPUs sampling and
training in turn, and asynchronous with a quarter of them training. The second half keeps attempts in flight against
stand-ins of vLLM servers over loopback, and measures how late the event loop is.

Prints one JSON object as its last line: `async_over_sync, in_flight, loop_lag_p99_ms`, and what they are made of. Exits
0 only where the ratio is at least 2.3 and the lag below 50 ms with 16,000 in flight (`--quick`: 1,000).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from deepswe.config import AgentConfig, AsynchronyConfig, RolloutConfig, VllmConfig, build_recipe
from deepswe.envs.base import Environment, Outcome, Suite, Verdict
from deepswe.policy.scripted import ByteRenderer
from deepswe.policy.vllm import VllmPolicy
from deepswe.rollout.flow import Flow
from deepswe.rollout.flow_groups import FlowPlan
from deepswe.rollout.ledger import Ledger
from deepswe.rollout.scheduler import Scheduler
from deepswe.rollout.store import TrajectoryStore
from deepswe.simulate.profile import Profile
from deepswe.simulate.run import Simulated, simulate
from deepswe.types import Ending, Graded, Message

RATIO, LAG_MS = 2.3, 50.0
TICK_S = 0.01


def simulated(tasks: int, steps: int, profile: Profile, **asynchrony: Any) -> Simulated:
    recipe = build_recipe(
        {
            "run": {"name": "simulated"},
            "tasks": {"kind": "micro"},
            "rollout": {"tasks_per_step": tasks, "group_size": 8, "max_steps": 50},
            "training": {"steps": steps},
            "asynchrony": asynchrony,
        },
        origin="benchmark",
    )
    with tempfile.TemporaryDirectory(prefix="scheduler-") as scratch:
        return simulate(recipe, profile, Path(scratch))


def compare(tasks: int, steps: int) -> dict[str, Any]:
    """Both ways on the same GPUs; the synchronous run needs fewer steps to be measured."""
    waiting = simulated(tasks, max(6, steps // 2), Profile(gpus=tasks))
    flowing = simulated(tasks, steps, Profile(gpus=tasks, learner_gpus=max(1, tasks // 4)), max_age=4)
    print(f"synchronous\n{waiting.text()}\nasynchronous\n{flowing.text()}", file=sys.stderr)
    return {
        "async_over_sync": round(flowing.steps_per_hour / waiting.steps_per_hour, 3),
        "sync_steps_per_hour": round(waiting.steps_per_hour, 3),
        "async_steps_per_hour": round(flowing.steps_per_hour, 3),
        "age_max": max(flowing.ages),
        "attempts_a_step": tasks * 8,
    }


@dataclass(frozen=True)
class Name:
    id: str


@dataclass
class Waiting:
    """An environment that only waits: `turns` tool calls of some seconds."""

    seed: int
    turns: int = 3
    turn: int = 0

    async def start(self) -> Sequence[Message]:
        return [Message("user", "x" * 400)]

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        self.turn += 1
        await asyncio.sleep(2.0 + (self.seed + self.turn) % 5)
        return Outcome("ok" * 50, done=self.turn >= self.turns)

    async def finish(self) -> Verdict:
        return Verdict(Graded(float(self.seed % 2)))

    async def close(self) -> None:
        pass


class WaitingSuite(Suite):
    def split(self, name: str) -> Sequence[Name]:
        return ()

    def open(self, task: Any, *, seed: int) -> Environment:
        return Waiting(seed)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def stand_ins(count: int, token_s: float) -> Iterator[tuple[str, ...]]:
    """Stand-ins of vLLM servers, in processes of their own."""
    ports = [free_port() for _ in range(count)]
    command = [sys.executable, "-m", "tests.vllm_server.server", "--flat", "--interval", "64"]
    root = Path(__file__).parents[1]
    servers = [subprocess.Popen([*command, "--port", str(port), "--token-s", str(token_s)], cwd=root) for port in ports]
    try:
        yield tuple(f"http://127.0.0.1:{port}" for port in ports)
    finally:
        for server in servers:
            server.kill()
            server.wait()


async def until_up(addresses: Sequence[str]) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        for address in addresses:
            while True:
                try:
                    async with session.get(f"{address}/health"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)


@asynccontextmanager
async def lateness(late_ms: list[float]) -> AsyncIterator[None]:
    """How late a tick of 10 ms comes, again and again; appended in ms."""

    async def watch() -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            late_ms.append(max(0.0, (time.monotonic() - due) * 1000))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def keep_in_flight(attempts: int, measured_s: float, scratch: Path) -> dict[str, Any]:
    """So many attempts at once through the flow and the policy; lags count once all are in flight."""
    tokens, token_s = 128, 0.5
    with stand_ins(max(1, attempts // 4000), token_s) as addresses:
        await until_up(addresses)
        async with VllmPolicy(VllmConfig(servers=addresses)) as policy:
            rollout = RolloutConfig(max_steps=8, max_turn_tokens=tokens, max_tokens=4000, concurrency=attempts)
            scheduler = Scheduler(
                WaitingSuite(), policy, ByteRenderer(), rollout=rollout, agent=AgentConfig(), concurrency=attempts,
                seed=0,
            )  # fmt: skip
            groups = attempts // 8
            plan = FlowPlan("train", 1000, groups, 8, 1.0, frozenset({Ending.ERROR}))
            store = TrajectoryStore(scratch)
            flow = Flow(
                scheduler,
                store,
                Ledger(scratch / "trajectories" / "ledger.jsonl"),
                plan=plan,
                config=AsynchronyConfig(max_age=4),
                draw=lambda step: [Name(f"{step}-{place}") for place in range(groups)],
            )
            begun, most, late_ms = time.monotonic(), 0, list[float]()
            async with flow.running() as tasks:
                batches = tasks.create_task(flow.batch(0))
                async with asyncio.timeout(300):
                    while scheduler.slots.taken < attempts:  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                filled_s = time.monotonic() - begun
                async with lateness(late_ms):
                    end = time.monotonic() + measured_s
                    while time.monotonic() < end:
                        await asyncio.sleep(0.5)
                        most = max(most, scheduler.slots.taken)
                batches.cancel()
    endings = Counter(t.ending for t in store.read("train"))
    late_ms.sort()
    return {
        "in_flight": most,
        "loop_lag_p99_ms": round(late_ms[int(0.99 * (len(late_ms) - 1))], 1),
        "loop_lag_p50_ms": round(late_ms[len(late_ms) // 2], 1),
        "filled_s": round(filled_s, 1),
        "failed": endings[Ending.ERROR],
        "whole": endings[Ending.SUBMITTED],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 tasks a step and 1,000 attempts in flight")
    parser.add_argument("--only", choices=("simulated", "real"), help="one half alone")
    arguments = parser.parse_args()
    wanted = 1000 if arguments.quick else 16_000
    result: dict[str, Any] = {}
    if arguments.only != "real":
        result |= compare(8, 12) if arguments.quick else compare(64, 20)
    if arguments.only != "simulated":
        with tempfile.TemporaryDirectory(prefix="scheduler-") as scratch:
            result |= asyncio.run(keep_in_flight(wanted, 10.0 if arguments.quick else 60.0, Path(scratch)))
    print(json.dumps(result))
    fast = result.get("async_over_sync", RATIO) >= (1.5 if arguments.quick else RATIO)
    prompt = result.get("in_flight", wanted) >= wanted and result.get("loop_lag_p99_ms", 0.0) < LAG_MS
    return 0 if fast and prompt else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
