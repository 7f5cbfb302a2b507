"""The memory that a process may take, against trees that look like hosts and containers."""

import os
from pathlib import Path

import pytest

from deepswe.memory import available_memory_mib, usable_memory_mib

MIB, GIB = 1 << 20, 1 << 30
MACHINE_MIB = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
NONE_OF_VERSION_1 = 9223372036854771712


def machine(root: Path, available: int = 300 * GIB) -> Path:
    """A /proc of a machine, without control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 536870912 kB\nMemAvailable: {available >> 10} kB\n")
    return root / "proc"


def group(place: Path, limit: int | str, used: int, *, active: int = 0, inactive: int = 0, shmem: int = 0) -> None:
    """One of version 2, and of version 1 at once, whose statistics have a line for itself and one with all below."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.limit_in_bytes").write_text(f"{NONE_OF_VERSION_1 if limit == 'max' else limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.usage_in_bytes").write_text(f"{used}\n")
    own = f"shmem {shmem}\nactive_file {active}\ninactive_file {inactive}\n"
    (place / "memory.stat").write_text(own + f"total_active_file {active}\ntotal_inactive_file {inactive}\n")


def inside(proc: Path, groups: Path, version: int, name: str = "/") -> Path:
    """The same /proc, of a process in a group."""
    (proc / "self/cgroup").write_text(f"4:memory:{name}\n3:cpu:/\n" if version == 1 else f"0::{name}\n")
    kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup2 rw"
    (proc / "self/mountinfo").write_text(f"30 1 0:27 / {groups} rw - {kind}\n")
    return proc


def test_without_control_groups_the_machine_s_memory_counts(tmp_path):
    assert available_memory_mib(machine(tmp_path)) == 300 << 10
    assert usable_memory_mib(tmp_path / "proc") == MACHINE_MIB


def test_where_the_kernel_says_nothing_half_of_the_memory_counts(tmp_path):
    assert available_memory_mib(tmp_path) == pytest.approx(MACHINE_MIB / 2, abs=1)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_limit_leaves(version, tmp_path):
    proc = inside(machine(tmp_path), tmp_path / "groups", version)
    group(tmp_path / "groups", 512 * MIB, 200 * MIB)
    assert available_memory_mib(proc) == 312
    assert usable_memory_mib(proc) == 512


@pytest.mark.parametrize("version", [1, 2])
def test_contents_of_files_can_be_dropped_and_those_of_a_tmpfs_cannot(version, tmp_path):
    proc = inside(machine(tmp_path), tmp_path / "groups", version)
    group(tmp_path / "groups", 512 * MIB, 500 * MIB, active=100 * MIB, inactive=50 * MIB, shmem=300 * MIB)
    assert available_memory_mib(proc) == 162


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_without_a_limit_bounds_nothing(version, tmp_path):
    proc = inside(machine(tmp_path), tmp_path / "groups", version)
    group(tmp_path / "groups", "max", 200 * MIB)
    assert available_memory_mib(proc) == 300 << 10
    assert usable_memory_mib(proc) == MACHINE_MIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_on_the_way_up_that_leaves_the_least_counts(version, tmp_path):
    groups = tmp_path / "groups"
    proc = inside(machine(tmp_path), groups, version, "/pods/one/own")
    group(groups / "pods/one/own", 100 * MIB, 10 * MIB)
    group(groups / "pods/one", 400 * MIB, 370 * MIB)
    group(groups / "pods", "max", 370 * MIB)
    group(groups / "other", 1 * MIB, 1 * MIB)
    assert available_memory_mib(proc) == 30
    assert usable_memory_mib(proc) == 100


def test_a_machine_that_has_less_than_the_limit_leaves_counts(tmp_path):
    proc = inside(machine(tmp_path, available=1 * GIB), tmp_path / "groups", 2)
    group(tmp_path / "groups", 4 * GIB, 1 * GIB)
    assert available_memory_mib(proc) == 1024


def test_a_group_past_its_limit_has_nothing_left(tmp_path):
    proc = inside(machine(tmp_path), tmp_path / "groups", 2)
    group(tmp_path / "groups", 100 * MIB, 101 * MIB)
    assert available_memory_mib(proc) == 0


def test_a_group_that_does_not_say_what_is_used_leaves_its_limit(tmp_path):
    proc = inside(machine(tmp_path), tmp_path / "groups", 2)
    group(tmp_path / "groups", 100 * MIB, 60 * MIB)
    (tmp_path / "groups/memory.stat").write_text("anon 5\n")
    assert available_memory_mib(proc) == 100


@pytest.mark.parametrize("text", ["", "much", "max"])
def test_a_limit_that_cannot_be_read_is_none(text, tmp_path):
    proc = inside(machine(tmp_path), tmp_path / "groups", 2)
    group(tmp_path / "groups", text, 60 * MIB)
    assert available_memory_mib(proc) == 300 << 10
