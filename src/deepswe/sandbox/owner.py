"""Who owns a sandbox, in words that any later process can check: process, its start, and the machine it runs on.

A tag is `PID-START-HOST`, of letters, digits and dashes, so that it fits a directory's name, a container's label and a
Kubernetes label. HOST is the boot and the PID namespace: only within both does a process id mean anything.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PREFIX = "deepswe-"
"""What the names of everything of ours begin with."""
FORGOTTEN_S = 7 * 86400.0
"""After this long the owner on another machine, or before a reboot, of a local file counts as dead."""
_TAG = re.compile(r"(\d+)-(\d+)-([0-9a-z]+)")


@dataclass(frozen=True, slots=True)
class Owner:
    """One process.

    Attributes:
        pid, start: process id, and when it started (ticks since boot on Linux, else seconds since 1970).
        host: boot and PID namespace (Linux), else the machine's name; hashed to letters and digits.
    """

    pid: int
    start: int
    host: str

    @property
    def tag(self) -> str:
        """As a part of a name."""
        return f"{self.pid}-{self.start}-{self.host}"

    def state(self) -> Literal["alive", "dead", "unknown"]:
        """Whether it still runs; unknown on another machine, boot or PID namespace."""
        if self.host != this_host():
            return "unknown"
        return "alive" if start_time(self.pid) == self.start else "dead"


def this_process() -> Owner:
    """The owner of what this process makes."""
    return Owner(os.getpid(), start_time(os.getpid()), this_host())


def read_owner(text: str) -> Owner | None:
    """The owner that a tag, or a name of ours beginning with one, tells; None if it tells none."""
    match = _TAG.match(text.removeprefix(PREFIX))
    return Owner(int(match[1]), int(match[2]), match[3]) if match else None


def start_time(pid: int) -> int:
    """When a process started (see `Owner.start`); 0 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0 if Path("/proc/self/stat").exists() else _start_by_ps(pid)
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if fields[0] not in ("Z", "X") else 0


def _start_by_ps(pid: int) -> int:
    """The same where there is no /proc, such as on macOS."""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={"LC_ALL": "C"}, timeout=10, check=False)
        moment = datetime.datetime.strptime(done.stdout.strip(), "%a %b %d %H:%M:%S %Y")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0
    return int(moment.timestamp())


@functools.cache
def this_host() -> str:
    """This boot of this machine, and the PID namespace."""
    try:
        words = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        words = socket.gethostname()
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def is_abandoned(name: str, age_s: float = 0.0) -> bool:
    """Whether `name` is of ours and its owner is dead, or cannot be asked and `age_s` is long."""
    owner = read_owner(name) if name.startswith(PREFIX) else None
    if owner is None:
        return False
    state = owner.state()
    return state == "dead" or (state == "unknown" and age_s > FORGOTTEN_S)


def judge(tag: str, expires: float, now: float) -> Literal["live", "orphaned", "expired"]:
    """What a reaper makes of a sandbox: `orphaned` if its owner is known to be dead, else by its expiry.

    Args:
        tag: the owner's; one that cannot be read is no reason to end a sandbox before it expires.
        expires, now: seconds since 1970.
    """
    owner = read_owner(tag)
    if owner is not None and owner.state() == "dead":
        return "orphaned"
    return "expired" if expires <= now else "live"
