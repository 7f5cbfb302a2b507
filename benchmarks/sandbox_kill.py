"""Start sandboxes by the thousand and kill at random: a sandbox, the server in it, the launcher, the client.

Of a sandbox any process is killed but the server: one that is just starting, bubblewrap, a command or a daemon.

Clients open sandboxes that run daemons and write files; this program kills their processes with SIGKILL, and starts a
new client when one is gone. At the end `deepswe sandbox reap` runs, and whatever is left is counted.
Prints one JSON object as its last line; exits 0 only where nothing is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Literal

from deepswe.cli.progress import TerminalProgress
from deepswe.config import SandboxConfig
from deepswe.errors import SandboxError, SandboxUnavailable
from deepswe.progress import Progress
from deepswe.sandbox.base import SandboxSpec
from deepswe.sandbox.bench import children, descendants
from deepswe.sandbox.launcher import TITLE
from deepswe.sandbox.owner import PREFIX
from deepswe.sandbox.pool import SandboxPool

AT_ONCE = 12
SETTLE_S = 60.0
MARK = "7731"
"""The daemons sleep for this many seconds and more, by which they are found."""
KINDS = ("sandbox", "server", "launcher", "client")
WEIGHTS = (20, 20, 3, 2)
STARTS_A_KILL = 4
DAEMONS = f"(setsid sleep {MARK}1 &); (setsid sh -c 'trap \"\" TERM; sleep {MARK}2' &); echo x > file; sleep 0.0$RANDOM"


async def client(walls: Literal["auto", "bubblewrap"]) -> None:
    """Open and close sandboxes until somebody kills this process; a dot on stdout for each start."""
    rng = random.Random()

    async def lives(pool: SandboxPool) -> None:
        while True:
            try:
                async with pool.open(SandboxSpec()) as sandbox:
                    os.write(1, b".")
                    await sandbox.exec(["bash", "-c", DAEMONS], timeout_s=rng.choice((0.05, 30)))
                    await sandbox.write_files({"/testbed/more": bytes(100_000)})
            except SandboxError as error:
                if "launcher is gone" in str(error):
                    return

    while True:
        try:
            async with SandboxPool(SandboxConfig(concurrency=AT_ONCE, walls=walls), "kill") as pool:
                await asyncio.gather(*(lives(pool) for _ in range(AT_ONCE)))
        except SandboxUnavailable:  # its launcher was killed as it started
            continue


class Driver:
    """Keeps one client alive and kills around it."""

    def __init__(self, starts: int, seed: int, walls: str, place: Path, progress: Progress) -> None:
        self.wanted = starts
        self.command = [sys.executable, __file__, "--client", "--walls", walls]
        self.starts = 0
        self.kills: Counter[str] = Counter()
        self.rng = random.Random(seed)
        self.environment = {**os.environ, "TMPDIR": str(place)}
        self.owners: list[int] = []
        self.progress = progress

    def run(self) -> None:
        """Until there were so many starts."""
        self.progress.begin("starts", self.wanted)
        while self.starts < self.wanted:
            with subprocess.Popen(self.command, env=self.environment, stdout=subprocess.PIPE) as process:
                self.owners.append(process.pid)
                assert process.stdout is not None
                os.set_blocking(process.stdout.fileno(), False)
                try:
                    self.torment(process)
                finally:
                    process.kill()
                self.count(process)

    def torment(self, process: subprocess.Popen[bytes]) -> None:
        """Kill until the client is gone or there were enough starts."""
        while self.starts < self.wanted and process.poll() is None:
            goal = self.starts + 1 + self.rng.expovariate(1 / STARTS_A_KILL)
            while self.starts < goal and process.poll() is None:
                time.sleep(0.005)
                self.count(process)
            time.sleep(self.rng.uniform(0, 0.1))
            kind = self.rng.choices(KINDS, WEIGHTS)[0]
            victims = [process.pid] if kind == "client" else find(process.pid, kind)
            if victims:
                kill(self.rng.choice(victims))
                self.kills[kind] += 1

    def count(self, process: subprocess.Popen[bytes]) -> None:
        """Read what the client told."""
        assert process.stdout is not None
        fresh = len(process.stdout.read() or b"")
        self.starts += fresh
        self.progress.advance(fresh, f"{sum(self.kills.values())} kills")


def find(client_pid: int, kind: str) -> list[int]:
    """The processes of a client that are of one kind."""
    below = descendants(client_pid)
    launchers = [pid for pid in children(client_pid) if pid in below and b"sandbox.launcher" in command_line(pid)]
    if kind == "launcher":
        return launchers
    inside = [pid for pid in below if pid not in launchers]
    servers = [pid for pid in inside if is_server(command_line(pid))]
    return servers if kind == "server" else [pid for pid in inside if pid not in servers]


def is_server(line: bytes) -> bool:
    """Whether a command line is that of a sandbox's server, whichever way it was started."""
    return TITLE.encode() in line or (b"server.pyc" in line and b"--die-with-parent" not in line)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def left_processes(place: Path) -> list[str]:
    """Processes that belong to a sandbox of ours: by the directory in their arguments, or a daemon's sleep."""
    marks = (str(place).encode(), f"sleep\0{MARK}".encode())
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        line = command_line(int(name))
        if int(name) != os.getpid() and any(mark in line for mark in marks):
            found.append(line.replace(b"\0", b" ").decode("utf-8", "replace")[:200])
    return found


def left_cgroups(owners: list[int]) -> list[str]:
    """Control groups whose names begin with one of our clients."""
    found = []
    for place, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{place}/{name}" for name in names if any(name.startswith(f"{PREFIX}{pid}-") for pid in owners)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="300 starts")
    parser.add_argument("--starts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--walls", choices=("auto", "bubblewrap"), default="auto", help="see sandbox.walls")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        asyncio.run(client(arguments.walls))
        return 0
    mounts = Path("/proc/self/mounts").read_text()
    with tempfile.TemporaryDirectory(prefix="deepswe-kill-") as name, TerminalProgress() as progress:
        place = Path(name)
        driver = Driver(300 if arguments.quick else arguments.starts, arguments.seed, arguments.walls, place, progress)
        driver.run()
        command = [sys.executable, "-m", "deepswe", "sandbox", "reap", "--backend", "bubblewrap"]
        subprocess.run(command, env=driver.environment, check=True, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + SETTLE_S
        while left_processes(place) and time.monotonic() < deadline:
            time.sleep(0.2)
        subprocess.run(command, env=driver.environment, check=True, stdout=subprocess.DEVNULL)
        processes, groups = left_processes(place), left_cgroups(driver.owners)
        directories = [str(path) for path in place.glob("deepswe-sandboxes-*/*")]
        ours = [line for line in Path("/proc/self/mounts").read_text().splitlines() if name in line]
    for text in (*processes, *groups, *directories, *ours):
        print("left:", text, file=sys.stderr)
    row = {
        "walls": arguments.walls,
        "starts": driver.starts,
        "kills": sum(driver.kills.values()),
        **{f"kills_{kind}": driver.kills[kind] for kind in KINDS},
        "leaked_processes": len(processes),
        "leaked_mounts": len(ours) + (name in mounts),
        "leaked_cgroups": len(groups),
        "leaked_dirs": len(directories),
    }
    print(json.dumps(row))
    return 1 if any(row[f"leaked_{kind}"] for kind in ("processes", "mounts", "cgroups", "dirs")) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is open is closed, as after Ctrl-C
    sys.exit(main())
