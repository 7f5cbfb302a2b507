"""The control groups that this process is in, and those above them: what one allows bounds all that is in it."""

from __future__ import annotations

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


def bounding_groups(controller: str, proc: Path) -> list[tuple[Path, int]]:
    """Directory and version of each group that bounds the process by a controller: its own, and those above them.

    Args:
        controller: such as "cpu".
        proc: where `cgroup` and `mountinfo` are read; without them there is no group.
    """
    try:
        own, mounts = own_groups(proc), group_mounts(proc)
    except OSError:
        return []
    found: list[tuple[Path, int]] = []
    for mount in mounts:
        name = "" if mount.version == 2 else controller
        if name in own and (mount.version == 2 or name in mount.controllers):
            group = mount.directory(own[name])
            within = (place for place in (group, *group.parents) if place.is_relative_to(mount.point))
            found += [(place, mount.version) for place in within]
    return found


def _mounts(mountinfo: str) -> Iterator[Mount]:
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split(" ")
            names = frozenset(options.rpartition(" ")[2].split(",")) if kind == "cgroup" else frozenset()
            yield Mount(fields[3], Path(fields[4]), 2 if kind == "cgroup2" else 1, names)
