"""Kill whatever a run consists of, again and again: the trainer, a server, one sandbox, all sandboxes.

One asynchronous run of the real loop, flow, pool and vLLM policy: servers are stand-ins (`tests/vllm_server`),
sandboxes are bare processes, the learner only counts. Kills come as the run gets on, at even shares of its attempts;
what was killed is started again. Prints one JSON object as its last line: `kills, lost, double, hung`, and how many of
each kind. Exits 0 only where all kills were made, the run finished, every attempt was recorded once, every step trained
its groups once, and nothing hung. `--quick` makes 12 kills.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepswe.atomic import write_atomically
from deepswe.config import Recipe, VllmConfig, build_recipe
from deepswe.envs.base import Environment, Outcome, Suite, Verdict
from deepswe.errors import SandboxDied
from deepswe.policy.scripted import ByteRenderer
from deepswe.policy.vllm import VllmPolicy
from deepswe.progress import Silent
from deepswe.rollout.flow import Flow
from deepswe.rollout.frames import count_frames
from deepswe.rollout.ledger import Ledger
from deepswe.rollout.scheduler import Scheduler
from deepswe.rollout.store import TrajectoryStore
from deepswe.sandbox.base import ExecResult, Sandbox, SandboxSpec
from deepswe.sandbox.memory import MemorySandbox
from deepswe.sandbox.pool import SandboxPool
from deepswe.training.loop import TrainingLoop, choose_tasks, flow_plan
from deepswe.training.metrics import MetricsLog, read_rows
from deepswe.training.weights import FileTransfer, VllmWeights
from deepswe.types import Graded, Message, Trajectory

GROUPS, ATTEMPTS, SERVERS = 4, 4, 3
SILENT_S = 90.0
"""Without a new record for so long, the run hangs."""
KINDS = ("trainer", "server", "sandbox", "pool")
SANDBOX = ["cat"]
"""Ends with the trainer, which holds the other end of its input."""


def recipe(steps: int) -> Recipe:
    return build_recipe(
        {
            "run": {"name": "killed"},
            "tasks": {"kind": "micro"},
            "sandbox": {"backend": "kubernetes", "concurrency": 24},
            "rollout": {
                "tasks_per_step": GROUPS, "group_size": ATTEMPTS, "concurrency": 24, "max_steps": 4,
                "max_tokens": 1500, "max_turn_tokens": 24, "max_retries": 8,
            },
            "training": {"steps": steps, "checkpoint_every": 2},
            "asynchrony": {"max_age": 2},
        },
        origin="benchmark",
    )  # fmt: skip


# The trainer: a process of its own.


@dataclass(frozen=True)
class Name:
    id: str


class ProcessSandbox(MemorySandbox):
    """A sandbox is alive while its process is."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self._process = process

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        if self._process.returncode is not None:
            raise SandboxDied(f"the process of sandbox {self.id} is gone")
        return ExecResult(0, b"", b"")


class ProcessBackend:
    """Starts one process a sandbox, and leaves their ids in a file for whoever wants to kill them."""

    def __init__(self) -> None:
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, spec: SandboxSpec, timeout_s: float) -> Sandbox:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*SANDBOX, stdin=pipe, stdout=asyncio.subprocess.DEVNULL)
        self._processes[name] = process
        return ProcessSandbox(process)

    async def stop(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self) -> None:
        for name in list(self._processes):
            await self.stop(name)

    def abort(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()


@dataclass
class Looking:
    """Looks into its sandbox at every turn; graded in a fresh one."""

    pool: SandboxPool
    seed: int
    turn: int = 0
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    sandbox: Sandbox | None = None

    async def start(self) -> Sequence[Message]:
        await self._open()
        return [Message("user", "look")]

    async def act(self, completion: str, *, timeout_s: float) -> Outcome:
        assert self.sandbox is not None
        await asyncio.sleep(0.02 + 0.02 * ((self.seed + self.turn) % 5))
        await self.sandbox.exec(["true"], timeout_s=5)
        self.turn += 1
        return Outcome("seen", done=self.turn >= 3)

    async def finish(self) -> Verdict:
        assert self.sandbox is not None
        await self.held.aclose()
        await self._open()
        await self.sandbox.exec(["true"], timeout_s=5)
        return Verdict(Graded(float(self.seed % 2)))

    async def close(self) -> None:
        await self.held.aclose()

    async def _open(self) -> None:
        self.held = AsyncExitStack()
        self.sandbox = await self.held.enter_async_context(self.pool.open(SandboxSpec()))


@dataclass
class LookingSuite(Suite):
    pool: SandboxPool

    def split(self, name: str) -> Sequence[Name]:
        return ()

    def open(self, task: Any, *, seed: int) -> Environment:
        return Looking(self.pool, seed)


@dataclass
class Counting:
    """A learner that counts: its state is its version. What each update trained on goes to a file."""

    log: Path
    version: int = 0

    def update(self, groups: Sequence[Sequence[Trajectory]], *, measure_start: bool = False) -> dict[str, float]:
        time.sleep(0.1)
        self.version += 1
        keys = sorted(str(t.key) for group in groups for t in group)
        with self.log.open("a") as file:
            file.write(json.dumps([self.version, keys]) + "\n")
        return {"seconds": 0.1, "entropy": 0.5, "updates": 1.0}

    def write(self, path: Path) -> None:
        (path / "model.safetensors").write_bytes(str(self.version).encode())


async def train(run: Path, servers: Sequence[str], steps: int) -> None:
    wanted = recipe(steps)
    checkpoint = run / "checkpoint.json"
    start = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
    learner = Counting(run / "updates.jsonl", start)
    tasks = tuple(Name(f"task-{number:03d}") for number in range(64))
    config = VllmConfig(servers=tuple(servers), silence_s=10.0, retries=20, directory=run)
    store = TrajectoryStore(run)
    async with (
        VllmPolicy(config) as policy,
        SandboxPool(wanted.sandbox, "killed", ProcessBackend()) as pool,
        VllmWeights(policy, FileTransfer(learner.write, run, timeout_s=20.0)) as weights,
    ):
        await weights.publish(learner.version)
        scheduler = Scheduler(
            LookingSuite(pool), policy, ByteRenderer(), rollout=wanted.rollout, agent=wanted.agent,
            concurrency=24, seed=0,
        )  # fmt: skip
        flow = Flow(
            scheduler,
            store,
            Ledger(store.directory / "ledger.jsonl"),
            plan=flow_plan(wanted),
            config=wanted.asynchrony,
            draw=lambda step: choose_tasks(tasks, count=GROUPS, step=step, seed=0),
        )
        with contextlib.closing(MetricsLog(run / "metrics.jsonl")) as metrics:
            loop = TrainingLoop(
                wanted, tasks, scheduler=scheduler, learner=learner, engine=weights, store=store, metrics=metrics,
                progress=Silent(), counters=dict, evaluate=no_evaluation, flow=flow,
                save=lambda step: write_atomically(checkpoint, json.dumps({"step": step})),
            )  # fmt: skip
            await loop.run(start)
    write_atomically(run / "finished", "yes")


async def no_evaluation(name: str, step: int) -> None:
    pass


# The killer.


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Run:
    """The processes of one run, and what is done to them."""

    def __init__(self, directory: Path, steps: int, chance: random.Random) -> None:
        self.directory, self.steps, self.chance = directory, steps, chance
        self.ports = [free_port() for _ in range(SERVERS)]
        self.servers = [self._server(port) for port in self.ports]
        self.log = (directory / "trainer.log").open("ab")
        self.killed: Counter[str] = Counter()
        self.stopped = 0
        self.trainer = self._trainer()

    def _server(self, port: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.vllm_server.server", "--flat", "--token-s", "0.004", "--interval", "4"]
        return subprocess.Popen([*command, "--port", str(port)], cwd=Path(__file__).parents[1])

    def _trainer(self) -> subprocess.Popen[bytes]:
        addresses = [f"http://127.0.0.1:{port}" for port in self.ports]
        command = [sys.executable, __file__, "--trainer", str(self.directory), "--steps", str(self.steps), *addresses]
        return subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def recorded(self) -> int:
        files = (self.directory / "trajectories").glob("train-*.zst")
        total = 0
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # it is committed in this moment
                total += count_frames(path)[0]
        return total

    def kill(self, kind: str) -> None:
        if kind == "trainer":
            self.trainer.kill()
            self.trainer.wait()
            self.trainer = self._trainer()
        elif kind == "server":
            place = self.chance.randrange(SERVERS)
            self.servers[place].kill()
            self.servers[place].wait()
            self.servers[place] = self._server(self.ports[place])
        else:
            alive = sandboxes_of(self.trainer.pid)
            if not alive:
                return
            for pid in alive if kind == "pool" else [self.chance.choice(alive)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.killed[kind] += 1

    def look_after(self) -> bool:
        """Start the trainer again where an error ended it; whether the run is finished."""
        if self.trainer.poll() is None:
            return False
        if (self.directory / "finished").exists():
            return True
        self.stopped += 1
        self.trainer = self._trainer()
        return False

    def close(self) -> None:
        for process in (self.trainer, *self.servers):
            process.kill()
            process.wait()
        self.log.close()


def sandboxes_of(parent: int) -> list[int]:
    """Ids of the trainer's sandbox processes."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name == SANDBOX[0] and int(rest.split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def account(directory: Path, steps: int) -> dict[str, int]:
    """Attempts and groups that are missing, and that are there twice."""
    counts = Counter(t.key for t in TrajectoryStore(directory).read("train"))
    ledger = Ledger(directory / "trajectories" / "ledger.jsonl")
    trained = Counter(number for numbers in ledger.trained.values() for number in numbers)
    rows = Counter(row["step"] for row in read_rows(directory / "metrics.jsonl") if row["kind"] == "train")
    again: dict[int, set[str]] = {}
    for line in (directory / "updates.jsonl").read_text().splitlines():
        version, keys = json.loads(line)
        again.setdefault(version, set()).add(json.dumps(keys))
    lost = len(ledger.opened) * ATTEMPTS - len(counts)
    lost += abs(steps * GROUPS - len(trained)) + abs(steps - len(rows))
    double = sum(counts.values()) - len(counts) + sum(trained.values()) - len(trained) + sum(rows.values()) - len(rows)
    # An update that was repeated after a kill must have had the same attempts.
    double += sum(len(seen) - 1 for seen in again.values())
    return {"lost": lost, "double": double}


def drive(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    steps = max(6, kills // 2)
    chance = random.Random(seed)
    run = Run(directory, steps, chance)
    total = steps * GROUPS * ATTEMPTS
    targets = [total * (place + 0.5) / (kills + 2) for place in range(kills)]
    kinds = [kind for _ in range(kills) for kind in chance.sample(KINDS, len(KINDS))]
    seen, since, hung = 0, time.monotonic(), 0
    try:
        while not run.look_after():
            time.sleep(0.05)
            now = run.recorded()
            if now > seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > SILENT_S:
                hung += 1
                break
            if targets and now >= targets[0]:
                time.sleep(chance.uniform(0.0, 0.2))
                before = sum(run.killed.values())
                run.kill(kinds[0])
                if sum(run.killed.values()) > before:
                    targets.pop(0)
                    kinds.pop(0)
                    since = time.monotonic()
    finally:
        run.close()
    result = {"kills": sum(run.killed.values()), "lost": -1, "double": -1, "hung": hung}
    if not hung:
        result |= account(directory, steps)
    return {**result, "stopped": run.stopped, "steps": steps, **{f"killed_{kind}": n for kind, n in run.killed.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="12 kills")
    parser.add_argument("--kills", type=int, default=0, help="how many; 0 takes 200, or 12")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("servers", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        asyncio.run(train(arguments.trainer, arguments.servers, arguments.steps))
        return 0
    kills = arguments.kills or (12 if arguments.quick else 200)
    with tempfile.TemporaryDirectory(prefix="kill-anything-") as scratch:
        result = drive(Path(scratch), kills, arguments.seed)
        if result["stopped"] or result["hung"] or result["lost"] or result["double"]:
            print((Path(scratch) / "trainer.log").read_text()[-3000:], file=sys.stderr)
    print(json.dumps(result))
    return 0 if result["kills"] >= kills and not (result["lost"] or result["double"] or result["hung"]) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
