"""How many cores this process may use, of those that the machine has.

Two things bound them: the cores that it may run on (its affinity), and the processor time that its control groups allow
(`docker run --cpus=2`, a pod's limit), which leaves all cores visible. Whoever starts as many threads as are visible is
stopped by the second for most of the time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """A hierarchy of control groups.

    Attributes:
        root: the group that is mounted.
        point: where.
        version: 1 or 2.
        controllers: of version 1, those that it has.
    """

    root: str
    point: Path
    version: int
    controllers: frozenset[str]

    def directory(self, group: str) -> Path:
        """Of a group."""
        inside = group if self.root == "/" else group.removeprefix(self.root)
        return self.point / inside.lstrip("/")


def group_mounts(proc: Path) -> list[Mount]:
    """All hierarchies, in the order in which they were mounted.

    Raises:
        OSError: there is no `mountinfo` in `proc`.
    """
    return list(_mounts((proc / "mountinfo").read_text()))


def own_groups(proc: Path) -> dict[str, str]:
    """Controller -> the group of the process; "" is version 2.

    Raises:
        OSError: there is no `cgroup` in `proc`.
    """
    own: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    return own


def usable_cores(proc: Path = Path("/proc/self")) -> int:
    """Cores that this process may use: at least 1; a part of a core counts as one, so that all of it is used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, *_quotas(proc))))


def _quotas(proc: Path) -> list[float]:
    """Cores' worth of processor time that the process's groups, and those above them, allow."""
    try:
        own, mounts = own_groups(proc), group_mounts(proc)
    except OSError:
        return [math.inf]
    found = [math.inf]
    for mount in mounts:
        name = "" if mount.version == 2 else "cpu"
        if name in own and (mount.version == 2 or name in mount.controllers):
            group = mount.directory(own[name])
            within = [place for place in (group, *group.parents) if place.is_relative_to(mount.point)]
            found += [_quota(place, mount.version) for place in within]
    return found


def _quota(group: Path, version: int) -> float:
    """What one group allows; infinite where it says nothing."""
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # the root of a hierarchy has no limit; "max" is none
        return math.inf


def _mounts(mountinfo: str) -> Iterator[Mount]:
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split(" ")
            names = frozenset(options.rpartition(" ")[2].split(",")) if kind == "cgroup" else frozenset()
            yield Mount(fields[3], Path(fields[4]), 2 if kind == "cgroup2" else 1, names)
