"""The Kubernetes backend at scale, against the API server of the tests: faults, leaks, writes, the cost of an action.

Part one: `pods` simulated pods, all alive at once, an episode in each, while one request, pod, watch or session in a
hundred meets each kind of fault. Part two: a client is killed with SIGKILL while it holds pods, and another process
reaps. Part three: 50 actions in one real pod (namespaces of this machine), without faults. The last line printed is one
JSON object:

    pods                   pods asked for, one episode each
    alive                  pods that ran at once
    faults                 kind -> how often it struck
    outcomes               how episodes ended -> how many: done, or the reason of the typed error
    untyped                episodes that ended with anything but a result or a SandboxError, or not at all
    loop_lag_p99_ms        how late the event loop of the client woke a timer, 99th percentile
    loop_lag_max_ms        the longest
    loop_busy_p99_ms       processor time that the loop took between two wake-ups of that timer, 99th percentile: what
                           the lag is on a machine that nobody else uses
    loop_busy_max_ms       the longest
    idle_lag_p99_ms        the same timer in another, idle process at the same time: what the machine itself is late
    writes_per_env         pods created and deleted, new tries included, per episode
    requests_per_env       all requests per episode, sessions and the share of the watch included
    reconnected            sessions that were opened anew and went on
    left                   pods left in the API server after all, the killed client's included
    reaped                 pods of the killed client that the other process ended
    overhead_50_actions_s  wall seconds of 50 actions less the seconds that their commands ran
    event_ms, event_model_ms   one event of a watch read as we do, and as objects of the generated client
    wall_s                 seconds for everything

Exit code 0 if untyped and left are 0, loop_lag_p99_ms is under 50, writes_per_env at most 5, overhead at most 6 s and
at least 85% of the pods (those that no fault befell early) were alive at once. `--quick` takes 200 pods.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError
from deepswe.sandbox.base import Sandbox, SandboxSpec
from deepswe.sandbox.kubernetes.backend import Backend, open_backend

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.kubernetes_server.faults import KINDS  # noqa: E402
from tests.kubernetes_server.process import ServerProcess  # noqa: E402

RATE = 0.01
TURNS = 6
THOUGHT_S = (1.0, 7.0)
"""Seconds between two actions of an episode, in which a model would write the next."""
EPISODE_S = 3600.0
STARTING, START_S = 128, 240.0
TICK_S = 0.005
HELD = 100


def config_of(kubeconfig: Path, **changes: Any) -> SandboxConfig:
    cluster = {"kubeconfig": str(kubeconfig), "writes_per_s": 200, "reads_per_s": 400, "unschedulable_s": 5}
    tree = {"backend": "kubernetes", "image": "test", "start_timeout_s": 120, "kubernetes": cluster, **changes}
    return SandboxConfig.model_validate(tree)


async def measure_lag(lags: list[float], busy: list[float]) -> None:
    """Wall seconds that a timer came late, and seconds of processor time that the loop took before it came."""
    while True:
        due, used = time.perf_counter() + TICK_S, time.thread_time()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - due)
        busy.append(time.thread_time() - used)


def at(share: float, values: list[float]) -> float:
    """A quantile, in milliseconds."""
    return round(1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 1)


async def act(sandbox: Sandbox) -> None:
    await sandbox.write_files({"/testbed/a.py": b"x = 1\n" * 100})
    for _ in range(TURNS):
        await asyncio.sleep(random.uniform(*THOUGHT_S))
        await sandbox.exec(["true"], timeout_s=30)
    await sandbox.read_file("/testbed/a.py")


class Crowd:
    """Episodes that wait for each other, so that their pods are alive together."""

    def __init__(self, backend: Backend, number: int) -> None:
        self.backend = backend
        self.number = number
        self.arrived = 0
        self.everyone = asyncio.Event()
        self.starting = asyncio.Semaphore(STARTING)
        self.outcomes: Counter[str] = Counter()
        self.untyped = 0
        self.told: list[str] = []
        self.reconnected = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.number:
            self.everyone.set()

    async def episode(self, number: int) -> None:
        name = f"bench-{number}"
        waiting = True
        try:
            async with asyncio.timeout(EPISODE_S):
                try:
                    async with self.starting:
                        sandbox = await self.backend.start(name, SandboxSpec(), START_S)
                    self.arrive()
                    waiting = False
                    await self.everyone.wait()
                    await asyncio.sleep(random.uniform(0, THOUGHT_S[1]))
                    await act(sandbox)
                    self.reconnected += sandbox.sessions_opened - 1
                finally:
                    if waiting:
                        self.arrive()
                    await self.backend.stop(name)
            self.outcomes["done"] += 1
        except SandboxError as error:
            if getattr(error, "reason", "") in ("slow", "session_lost", "api_server") and len(self.told) < 10:
                self.told.append(str(error))
                print(error, file=sys.stderr)
            self.outcomes[f"{type(error).__name__} {getattr(error, 'reason', '')}"] += 1
        except Exception as error:  # noqa: BLE001  (that is what is counted)
            print(f"untyped: {error!r}", file=sys.stderr)
            self.untyped += 1


def watch_idle(seconds: float) -> None:
    """A process that does nothing but measure; prints its 99th percentile every second."""

    async def main() -> None:
        lags: list[float] = []
        task = asyncio.create_task(measure_lag(lags, []))
        for _ in range(int(seconds)):
            await asyncio.sleep(1)
            print(at(0.99, lags), flush=True)
        task.cancel()

    asyncio.run(main())


async def run_crowd(config: SandboxConfig, number: int) -> dict[str, Any]:
    backend = open_backend(config, "bench", Path("/"))
    crowd = Crowd(backend, number)
    lags: list[float] = []
    busy: list[float] = []
    lag = asyncio.create_task(measure_lag(lags, busy))
    await asyncio.gather(*(crowd.episode(position) for position in range(number)))
    await backend.close()
    lag.cancel()
    figures = backend.figures
    return {
        "outcomes": dict(crowd.outcomes),
        "untyped": crowd.untyped,
        "loop_lag_p99_ms": at(0.99, lags),
        "loop_lag_max_ms": at(1, lags),
        "loop_busy_p99_ms": at(0.99, busy),
        "loop_busy_max_ms": at(1, busy),
        "writes_per_env": round(figures.writes / number, 2),
        "requests_per_env": round(sum(figures.requests.values()) / number, 2),
        "reconnected": crowd.reconnected,
    }


def hold(kubeconfig: Path, number: int) -> None:
    """The client that is killed: holds pods, says so, and waits."""

    async def main() -> None:
        backend = open_backend(config_of(kubeconfig), "held", Path("/"))
        results = await asyncio.gather(
            *(backend.start(f"held-{position}", SandboxSpec(), 120) for position in range(number)),
            return_exceptions=True,
        )
        print(sum(not isinstance(result, BaseException) for result in results), flush=True)
        await asyncio.sleep(3600)

    asyncio.run(main())


def kill_and_reap(server: ServerProcess) -> tuple[int, int]:
    """Pods that the reaper ended, and pods left."""
    argv = [sys.executable, __file__, "--hold", str(HELD), "--kubeconfig", str(server.kubeconfig)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        held = int(holder.stdout.readline())
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    alive = server.figures()["pods"]
    command = [sys.executable, "-c", "from deepswe.cli.main import main; main()", "sandbox", "reap", "--json"]
    command += ["--backend", "kubernetes", f"sandbox.kubernetes.kubeconfig={server.kubeconfig}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reaped = len(json.loads(done.stdout.splitlines()[-1])["reaped"])
    print(f"killed a client with {held} sandboxes; {alive} pods were left, {reaped} reaped", file=sys.stderr)
    return reaped, server.figures()["pods"]


async def measure_actions(config: SandboxConfig) -> float:
    """Our seconds in 50 actions of an agent."""
    backend = open_backend(config, "actions", Path("/"))
    sandbox = await backend.start("actions-1", SandboxSpec(), 60)
    await sandbox.write_files({f"/testbed/pkg/m{n}.py": b"def f(x):\n    return x + 1\n" * 40 for n in range(50)})
    scripts = [
        "ls -la pkg | head",
        "grep -rn 'return' pkg | head -20",
        "sed -n 1,40p pkg/m1.py",
        "cat pkg/m2.py",
        "true",
    ]
    spent = inside = 0.0
    for turn in range(50):
        began = time.perf_counter()
        if turn % 5 == 4:
            await sandbox.write_files({f"/testbed/pkg/m{turn}.py": await sandbox.read_file("/testbed/pkg/m1.py")})
        else:
            result = await sandbox.exec(["sh", "-c", scripts[turn % 5 % 4]], timeout_s=60)
            inside += result.wall_s
        spent += time.perf_counter() - began
    await backend.stop("actions-1")
    await backend.close()
    return spent - inside


def measure_events(number: int = 200) -> tuple[float, float]:
    """Milliseconds to read one event of a watch: as JSON, and as the generated client's objects."""
    from kubernetes_asyncio.client import ApiClient
    from kubernetes_asyncio.client.models import V1Pod

    from deepswe.sandbox.kubernetes import pods
    from deepswe.sandbox.kubernetes.failures import read_state

    config = config_of(Path("/"))
    pod = pods.pod_manifest("x", SandboxSpec(), "test", {}, config.kubernetes, 60)
    container = {"name": "sandbox", "image": "test", "imageID": "", "ready": True, "restartCount": 0}
    status = {"phase": "Running", "containerStatuses": [container | {"state": {"running": {}}}]}
    line = json.dumps(pod | {"status": status})

    async def both() -> tuple[float, float]:
        began = time.process_time()
        for _ in range(number):
            read_state(json.loads(line))
        ours = time.process_time() - began
        async with ApiClient() as client:
            began = time.process_time()
            for _ in range(number):
                client._ApiClient__deserialize(json.loads(line), V1Pod)
            theirs = time.process_time() - began
        return 1000 * ours / number, 1000 * theirs / number

    return asyncio.run(both())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pods", type=int, default=0)
    parser.add_argument("--idle", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--hold", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--kubeconfig", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.idle:
        watch_idle(arguments.idle)
        return
    if arguments.hold:
        hold(arguments.kubeconfig, arguments.hold)
        return
    began = time.monotonic()
    number = arguments.pods or (200 if arguments.quick else 2000)
    with tempfile.TemporaryDirectory(prefix="deepswe-bench-") as name:
        faults = dict.fromkeys(KINDS, RATE)
        with ServerProcess(Path(name), "--simulate", faults=faults) as server:
            argv = [sys.executable, __file__, "--idle", "3600"]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as idle:
                row = asyncio.run(run_crowd(config_of(server.kubeconfig), number))
                idle.terminate()
                row["idle_lag_p99_ms"] = float((idle.communicate()[0].split() or ["0"])[-1])
            figures = server.figures()
            left = figures["pods"]
            reaped, left_by_killed = kill_and_reap(server)
            struck = server.figures()["faults"]
    with tempfile.TemporaryDirectory(prefix="deepswe-bench-") as name, ServerProcess(Path(name)) as server:
        overhead = asyncio.run(measure_actions(config_of(server.kubeconfig)))
        left += server.figures()["pods"]
    ours, theirs = measure_events()
    row = {
        "pods": number,
        "alive": figures["most"],
        "faults": struck,
        **row,
        "left": left + left_by_killed,
        "reaped": reaped,
        "overhead_50_actions_s": round(overhead, 3),
        "event_ms": round(ours, 3),
        "event_model_ms": round(theirs, 3),
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(row))
    good = row["untyped"] == 0 and row["left"] == 0 and row["writes_per_env"] <= 5 and row["loop_lag_p99_ms"] < 50
    sys.exit(0 if good and row["overhead_50_actions_s"] <= 6 and row["alive"] >= 0.85 * number else 1)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    main()
