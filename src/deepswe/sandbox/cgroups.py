"""Control groups: the bounds on memory, processes and CPU of one sandbox, where this process may make groups.

Version 1 gets one directory per controller, under this process's own group of that controller. Version 2 gets one
directory, under this process's own group or, since a group with processes cannot have limited children, under its
parent. Where neither can be written, resource limits take over (see `namespaces`).

A directory's name starts with its owner's process id and start time, so that a later owner can tell what is left over.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepswe.control_groups import group_mounts, own_groups
from deepswe.sandbox.base import Limits
from deepswe.sandbox.owner import PREFIX, is_abandoned, this_process

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_WITH_SWAP = ("memory.memsw.limit_in_bytes", "memory.swap.max")
"""Files that exist only where the kernel accounts for swap."""


@dataclass(frozen=True)
class Group:
    """The directories of one sandbox, empty where there are none."""

    directories: tuple[Path, ...] = ()
    version: int = 0

    @functools.cached_property
    def entrances(self) -> tuple[str, ...]:
        """The files through which a process of one thread enters, by writing 0.

        In version 1 that is `tasks`: for the calling thread alone the kernel skips a lock that stops every fork of the
        host for an RCU grace period, some 10 ms.
        """
        name = "tasks" if self.version == 1 else "cgroup.procs"
        return tuple(str(directory / name) for directory in self.directories)


class Cgroups:
    """The place for our groups on this host, and the groups in it. One per pool.

    Groups are used again: making and removing one costs more than the rest of a sandbox's bookkeeping.
    """

    def __init__(self, proc: Path = Path("/proc/self"), tag: str = "") -> None:
        """Find out what can be limited.

        Args:
            proc: where `cgroup` and `mountinfo` are read.
            tag: the owner's; this process's if empty.
        """
        self._tag = tag or this_process().tag
        self._made = 0
        self._free: dict[Limits, list[Group]] = {}
        self._all: list[Group] = []
        self.version, self.parents = _find(proc)

    def enforced(self) -> Mapping[str, str]:
        """Limit name -> "cgroup v1" or "cgroup v2", for those that are."""
        names = {"memory": "memory_mib", "pids": "pids", "cpu": "cpus"}
        return {names[controller]: f"cgroup v{self.version}" for controller in self.parents}

    def take(self, limits: Limits) -> Group:
        """An empty group with these limits.

        Raises:
            OSError: it cannot be made.
        """
        waiting = self._free.get(limits)
        if waiting:
            return waiting.pop()
        self._made += 1
        name = f"{PREFIX}{self._tag}-{self._made}"
        directories: list[Path] = []
        try:
            for parent in dict.fromkeys(self.parents.values()):
                directory = parent / name
                directory.mkdir()
                directories.append(directory)
            for controller, parent in self.parents.items():
                for file, value in _settings(self.version, controller, limits).items():
                    _set(f"{parent}/{name}/{file}", value)
        except OSError:
            remove(Group(tuple(directories)))
            raise
        group = Group(tuple(directories), self.version)
        self._all.append(group)
        return group

    def give(self, group: Group, limits: Limits) -> None:
        """Take a group back whose processes have all ended."""
        self._free.setdefault(limits, []).append(group)

    def clear(self) -> bool:
        """Remove all groups; False while some still have processes. None may be taken any more."""
        self._free.clear()
        self._all = [group for group in self._all if not remove(group)]
        return not self._all

    def reap(self) -> int:
        """Remove what dead owners left, under whatever group they ran; returns the number of directories removed."""
        roots = dict.fromkeys(mount_point(parent) for parent in self.parents.values())
        return sum(remove(Group((directory,))) for root in roots for directory in find_abandoned(root))


def mount_point(path: Path) -> Path:
    """The hierarchy that a group's directory belongs to; the directory itself if nothing is mounted above it."""
    return next((place for place in (path, *path.parents[:-1]) if place.is_mount()), path)


def find_abandoned(root: Path) -> list[Path]:
    """The directories of sandboxes whose owners are dead, anywhere below `root`."""
    found: list[Path] = []
    for place, names, _ in os.walk(root):
        ours = [name for name in names if name.startswith(PREFIX)]
        found += [Path(place, name) for name in ours if is_abandoned(name)]
        names[:] = [name for name in names if name not in ours]
    return found


def remove(group: Group) -> bool:
    """Remove a group's directories; False if one still has processes or cannot be removed."""
    done = True
    for directory in group.directories:
        try:
            directory.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            done = False
    return done


def _set(path: str, value: str) -> None:
    """Write a setting; one about swap is left out where there is none."""
    if path.endswith(_WITH_SWAP) and not os.path.exists(path):
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _settings(version: int, controller: str, limits: Limits) -> dict[str, str]:
    memory = str(limits.memory_mib << 20)
    quota = str(int(limits.cpus * _PERIOD_US))
    if version == 1:
        return {
            "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
            "pids": {"pids.max": str(limits.pids)},
            "cpu": {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota},
        }[controller]
    return {
        "memory": {"memory.max": memory, "memory.swap.max": "0"},
        "pids": {"pids.max": str(limits.pids)},
        "cpu": {"cpu.max": f"{quota} {_PERIOD_US}"},
    }[controller]


def _find(proc: Path) -> tuple[int, dict[str, Path]]:
    """The version and, per controller that can be used, the directory in which groups are made."""
    try:
        own, mounts = own_groups(proc), group_mounts(proc)
    except OSError:
        return 0, {}
    first: dict[str, Path] = {}
    for mount in mounts:
        for controller in CONTROLLERS:
            if mount.version == 1 and controller in mount.controllers and controller in own:
                directory = mount.directory(own[controller])
                if controller not in first and os.access(directory, os.W_OK | os.X_OK):
                    first[controller] = directory
    if first:
        return 1, first
    for mount in mounts:
        if mount.version == 2 and "" in own:
            base = mount.directory(own[""])
            for directory in (base, base.parent) if base != mount.point else (base,):
                usable = _delegated(directory)
                if usable:
                    return 2, dict.fromkeys(usable, directory)
    return 0, {}


def _delegated(directory: Path) -> list[str]:
    """The controllers that groups made in a version 2 directory can use."""
    control = directory / "cgroup.subtree_control"
    writable = all(os.access(path, os.W_OK) for path in (directory, directory / "cgroup.procs"))
    if not writable or not control.exists():
        return []
    for controller in CONTROLLERS:
        if controller not in control.read_text().split():
            try:
                control.write_text(f"+{controller}")
            except OSError:
                continue
    active = control.read_text().split()
    return [controller for controller in CONTROLLERS if controller in active]
