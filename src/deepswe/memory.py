"""How much memory this process, and what it starts, may take of that which the machine has.

Its control groups bound it (`docker run --memory=4g`, a pod's limit), of which the machine's own figures know nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from deepswe.control_groups import bounding_groups

_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
_FILES = {1: ("total_active_file", "total_inactive_file"), 2: ("active_file", "inactive_file")}
"""In `memory.stat`: contents of files, which go when memory is needed; those in a tmpfs, which stay, do not count."""


def usable_memory_mib(proc: Path = Path("/proc")) -> int:
    """All that this process may ever take: the machine's memory, or the least limit of its groups."""
    limits = (_limit(group, version) for group, version in bounding_groups("memory", proc / "self"))
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits, math.inf)) >> 20


def available_memory_mib(proc: Path = Path("/proc")) -> int:
    """What is left of it now: MemAvailable of the machine, or what is left in the fullest of its groups.

    Where the kernel does not say (it is no Linux), half of the machine's memory counts as available.
    """
    return memory_gauge(proc)()


def memory_gauge(proc: Path = Path("/proc")) -> Callable[[], int]:
    """`available_memory_mib` for whoever asks often: the groups are looked for once, which is most of the work."""
    groups = bounding_groups("memory", proc / "self")

    def read() -> int:
        left = (_left(group, version) for group, version in groups)
        return int(min(_available(proc), *left, math.inf)) >> 20

    return read


def _available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 1 << 30)


def _limit(group: Path, version: int) -> float:
    """Bytes that one group allows; infinite where it says nothing."""
    try:
        return int((group / _LIMIT[version]).read_text())
    except (OSError, ValueError):  # the root of a hierarchy has no limit; "max" is none
        return math.inf


def _left(group: Path, version: int) -> float:
    """Bytes of a group's limit that are not in use; the whole limit where it does not say what is."""
    limit = _limit(group, version)
    if math.isinf(limit):
        return limit
    try:
        used = int((group / _USED[version]).read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0.0, limit - max(0, used - sum(int(kept[name]) for name in _FILES[version])))
    except (OSError, ValueError, KeyError):
        return limit
