"""What a sandbox of bubblewrap costs, against bare bubblewrap and `docker run`, all in the same run by turns."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError
from deepswe.progress import Progress
from deepswe.sandbox.base import Limits, SandboxSpec
from deepswe.sandbox.pool import SandboxPool
from deepswe.sandbox.view import interpreter, prepare_host, view

FEW, MANY = 64, 512
START_RATIO = 1.5
EXEC_MS = 3.0
DOCKER_RATIO = 15.0
PSS_MIB = 6.0
INTERPRETER = (interpreter(), "-I", "-S", "-E", "-X", "utf8", "-c", "import posix; posix._exit(0)")
"""What a sandbox's server runs on; without the interpreter's own clearing up."""
_DOCKER_S = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; milliseconds are medians.

    Attributes:
        start_p50_ms: from the request to a sandbox that runs commands, taken from a pool.
        bwrap_p50_ms: bare `bwrap` with the same arguments around `true`, from spawn to its end: the bound of a start.
        bwrap_python_p50_ms: the same with the interpreter that a sandbox needs to run commands, in place of `true`.
        docker_p50_ms: `docker run --rm` of `true`; None where no engine answers or it has no image.
        spawn_p50_ms: `true` as a plain process of this machine, which tells how busy that is.
        exec_p50_ms, stop_p50_ms: `true` in a live sandbox, and its end.
        alive_64_per_s, alive_512_per_s: starts per second up to so many alive at once.
        alive_64_failures, alive_512_failures: starts or commands that failed while so many were alive.
        pss_mib: memory of an idle sandbox's processes with 512 alive, shared pages counted by share.
    """

    start_p50_ms: float
    bwrap_p50_ms: float
    bwrap_python_p50_ms: float
    docker_p50_ms: float | None
    spawn_p50_ms: float
    exec_p50_ms: float
    stop_p50_ms: float
    alive_64_per_s: float
    alive_64_failures: int
    alive_512_per_s: float
    alive_512_failures: int
    pss_mib: float

    def missed(self) -> list[str]:
        """The targets that the figures miss, in words."""
        bounds = [
            ("start_p50_ms", self.start_p50_ms, START_RATIO * self.bwrap_p50_ms, f"{START_RATIO} x bwrap_p50_ms"),
            ("exec_p50_ms", self.exec_p50_ms, EXEC_MS, f"{EXEC_MS} ms"),
            ("alive_64_failures", self.alive_64_failures, 0, "none"),
            ("alive_512_failures", self.alive_512_failures, 0, "none"),
            ("pss_mib", self.pss_mib, PSS_MIB, f"{PSS_MIB} MiB"),
        ]
        if self.docker_p50_ms is not None:
            ours = self.start_p50_ms + self.exec_p50_ms + self.stop_p50_ms
            bounds.append(("start + exec + stop", ours, self.docker_p50_ms / DOCKER_RATIO, "a 15th of docker_p50_ms"))
        return [f"{name} is {value:.2f}, more than {words}" for name, value, most, words in bounds if value > most]


def measure(progress: Progress, *, samples: int = 100, few: int = FEW, many: int = MANY) -> Figures:
    """Measure. Not inside a running event loop.

    Args:
        samples: of each median.
        few, many: the two numbers of sandboxes alive at once; the keys keep their names whatever these are.

    Raises:
        SandboxUnavailable: this machine cannot run bubblewrap.
    """
    return asyncio.run(_measure(progress, samples, few, many))


async def _measure(progress: Progress, samples: int, few: int, many: int) -> Figures:
    progress.begin("start, exec, stop", samples)
    starts, execs, stops, bares, trues, spawns, dockers = await _one_at_a_time(progress, samples)
    few_rate, few_failures, _ = await _alive(progress, few)
    many_rate, many_failures, pss = await _alive(progress, many)
    return Figures(
        start_p50_ms=_p50_ms(starts),
        bwrap_p50_ms=_p50_ms(trues),
        bwrap_python_p50_ms=_p50_ms(bares),
        docker_p50_ms=_p50_ms(dockers) if dockers else None,
        spawn_p50_ms=_p50_ms(spawns),
        exec_p50_ms=_p50_ms(execs),
        stop_p50_ms=_p50_ms(stops),
        alive_64_per_s=few_rate,
        alive_64_failures=few_failures,
        alive_512_per_s=many_rate,
        alive_512_failures=many_failures,
        pss_mib=pss,
    )


def _p50_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)


async def _one_at_a_time(progress: Progress, samples: int) -> tuple[list[float], ...]:
    starts, execs, stops, bares, trues, spawns, dockers = ([] for _ in range(7))
    image = docker_image()
    with bare_bwrap() as bare:
        async with SandboxPool(SandboxConfig(), "bench") as pool:
            await pool.check()
            bare(INTERPRETER)
            for turn in range(samples):
                started = time.perf_counter()
                async with pool.open(SandboxSpec()) as sandbox:
                    starts.append(time.perf_counter() - started)
                    for _ in range(3):
                        started = time.perf_counter()
                        await sandbox.exec(["true"], timeout_s=60)
                        execs.append(time.perf_counter() - started)
                    started = time.perf_counter()
                stops.append(time.perf_counter() - started)
                bares.append(bare(INTERPRETER))
                trues.append(bare(("/usr/bin/true",)))
                spawns.append(_spawn())
                if image and turn % 10 == 0:
                    dockers.append(_docker_run(image))
                progress.advance()
    return starts, execs, stops, bares, trues, spawns, dockers


@contextmanager
def bare_bwrap() -> Iterator[Callable[[Sequence[str]], float]]:
    """A function that runs a program by bubblewrap with a sandbox's arguments; gives the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="deepswe-bench-") as name:
        host = prepare_host(Path(name))
        shown = view(host, SandboxSpec())
        for directory, mode in shown.directories:
            (host.upper / directory).mkdir(mode=mode)
        argv = [str(host.bwrap), *host.head, *shown.argv, *host.tail[: host.tail.index("--")], "--"]
        rules = os.open(host.seccomp, os.O_RDONLY)
        place = argv.index("--seccomp") + 1

        def run(program: Sequence[str]) -> float:
            command = [*argv[:place], str(rules), *argv[place + 1 :], *program]
            os.lseek(rules, 0, os.SEEK_SET)
            started = time.perf_counter()
            subprocess.run(command, env={}, pass_fds=[rules], check=True)
            return time.perf_counter() - started

        try:
            yield run
        finally:
            os.close(rules)


def docker_image() -> str:
    """An image that a Docker engine on this machine has; empty where none answers."""
    if shutil.which("docker") is None:
        return ""
    command = ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOCKER_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    names = [name for name in done.stdout.split() if "<none>" not in name]
    return names[0] if done.returncode == 0 and names else ""


def _spawn() -> float:
    started = time.perf_counter()
    subprocess.run(["/usr/bin/true"], check=True)
    return time.perf_counter() - started


def _docker_run(image: str) -> float:
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "true", image]
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, timeout=_DOCKER_S, check=True)
    return time.perf_counter() - started


async def _alive(progress: Progress, number: int) -> tuple[float, int, float]:
    """Starts per second up to `number` alive, failures, and MiB of each while all are idle."""
    progress.begin(f"{number} alive at once", number)
    config = SandboxConfig(concurrency=number, start_timeout_s=120)
    failures = 0
    async with SandboxPool(config, "bench") as pool, AsyncExitStack() as stack:

        async def one() -> bool:
            try:
                sandbox = await stack.enter_async_context(pool.open(SandboxSpec(limits=Limits())))
                result = await sandbox.exec(["true"], timeout_s=120)
            except SandboxError:
                return False
            progress.advance()
            return result.exit_code == 0

        started = time.perf_counter()
        done = await asyncio.gather(*(one() for _ in range(number)))
        rate = sum(done) / (time.perf_counter() - started)
        failures = len(done) - sum(done)
        pss = sum(_pss_mib(pid) for pid in descendants(os.getpid()) if _is_in_sandbox(pid)) / max(1, sum(done))
    return round(rate, 1), failures, round(pss, 3)


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that these started."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def _is_in_sandbox(pid: int) -> bool:
    """Whether it is bubblewrap or runs inside, not the launcher."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"deepswe.sandbox.launcher" not in line


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
