"""Control groups against a directory tree that looks like one: which files get which values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepswe.sandbox import cgroups
from deepswe.sandbox.base import Limits
from deepswe.sandbox.owner import this_host, this_process

LIMITS = Limits(memory_mib=64, pids=7, cpus=0.5)


def v2_host(root: Path, group: str, controllers: str) -> Path:
    """A fake /proc/self and a version 2 hierarchy with this process in `group`."""
    proc, point = root / "proc", root / "cgroup2"
    own = point / group.lstrip("/")
    own.mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text(f"0::{group}\n")
    (proc / "mountinfo").write_text(f"30 1 0:27 / {point} rw - cgroup2 cgroup2 rw\n")
    for directory in {own, own.parent, point}:
        (directory / "cgroup.procs").write_text("")
        (directory / "cgroup.subtree_control").write_text(controllers)
    return proc


def v1_host(root: Path) -> Path:
    proc = root / "proc"
    proc.mkdir()
    lines = []
    for name in cgroups.CONTROLLERS:
        (root / name / "outer" / "own").mkdir(parents=True)
        lines.append(f"30 1 0:27 /outer {root / name / 'outer'} rw - cgroup cgroup rw,{name}\n")
    (proc / "cgroup").write_text("3:cpu,cpuacct:/outer/own\n2:memory:/outer/own\n1:pids:/outer/own\n0::/\n")
    (proc / "mountinfo").write_text("".join(lines))
    return proc


def test_version_2_writes_memory_pids_and_cpu_into_one_group(tmp_path):
    groups = cgroups.Cgroups(v2_host(tmp_path, "/a/b", "memory pids cpu"), tag="1-2")
    group = groups.take(LIMITS)
    (directory,) = group.directories
    assert directory == tmp_path / "cgroup2/a/b/deepswe-1-2-1"
    assert (directory / "memory.max").read_text() == str(64 << 20)
    assert (directory / "pids.max").read_text() == "7"
    assert (directory / "cpu.max").read_text() == "50000 100000"
    assert not (directory / "memory.swap.max").exists()
    assert group.entrances == (str(directory / "cgroup.procs"),)
    assert groups.enforced() == {"memory_mib": "cgroup v2", "pids": "cgroup v2", "cpus": "cgroup v2"}


def test_version_2_takes_the_parent_when_the_own_group_gives_no_controllers(tmp_path):
    proc = v2_host(tmp_path, "/a/b", "memory pids cpu")
    (tmp_path / "cgroup2/a/b/cgroup.subtree_control").write_text("")  # what is written there enables nothing
    groups = cgroups.Cgroups(proc, tag="1-2")
    assert groups.take(LIMITS).directories == (tmp_path / "cgroup2/a/deepswe-1-2-1",)
    assert groups.enforced() == {"memory_mib": "cgroup v2", "pids": "cgroup v2", "cpus": "cgroup v2"}


def test_version_1_nests_under_the_own_group_of_each_controller(tmp_path):
    groups = cgroups.Cgroups(v1_host(tmp_path), tag="1-2")
    group = groups.take(LIMITS)
    assert group.directories == tuple(tmp_path / name / "outer/own/deepswe-1-2-1" for name in ("memory", "pids", "cpu"))
    assert group.entrances[0] == str(group.directories[0] / "tasks")
    assert (group.directories[0] / "memory.limit_in_bytes").read_text() == str(64 << 20)
    assert (group.directories[1] / "pids.max").read_text() == "7"
    assert (group.directories[2] / "cpu.cfs_quota_us").read_text() == "50000"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_groups_are_not_used(tmp_path):
    proc = v1_host(tmp_path)
    for name in cgroups.CONTROLLERS:
        (tmp_path / name / "outer/own").chmod(0o555)
    assert cgroups.Cgroups(proc, tag="1-2").enforced() == {}


def test_no_hierarchy_gives_empty_groups(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text("30 1 0:27 / / rw - ext4 /dev/vda rw\n")
    groups = cgroups.Cgroups(tmp_path, tag="1-2")
    assert groups.take(LIMITS) == cgroups.Group()
    assert groups.enforced() == {}


def test_a_group_is_used_again_for_equal_limits_only(tmp_path):
    groups = cgroups.Cgroups(v1_host(tmp_path), tag="1-2")
    first = groups.take(LIMITS)
    groups.give(first, LIMITS)
    assert groups.take(Limits()) != first
    assert groups.take(LIMITS) == first


def test_reaping_removes_dead_owners_only(tmp_path):
    proc = v1_host(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    parent = tmp_path / "memory/outer/own"
    alive, gone = parent / f"deepswe-{this_process().tag}-9", parent / f"deepswe-{dead.pid}-123-{this_host()}-9"
    reused = parent / f"deepswe-{os.getpid()}-1-{this_host()}-9"  # this pid, another start: an owner long dead
    foreign = parent / "docker-1-2-3"
    for directory in (alive, gone, reused, foreign):
        directory.mkdir()
    assert cgroups.Cgroups(proc).reap() == 2
    assert alive.exists()
    assert foreign.exists()
    assert not gone.exists()
    assert not reused.exists()


def test_what_a_dead_owner_left_is_found_under_whatever_group_it_ran(tmp_path: Path) -> None:
    dead = tmp_path / "elsewhere" / "deep" / f"deepswe-999999999-1-{this_host()}-1"
    alive = tmp_path / f"deepswe-{this_process().tag}-1"
    for directory in (dead, alive, tmp_path / "other"):
        directory.mkdir(parents=True)
    assert cgroups.find_abandoned(tmp_path) == [dead]
    assert cgroups.mount_point(Path("/proc/self")) == Path("/proc")
