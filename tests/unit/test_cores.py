"""The cores that a process may use, against trees that look like hosts and containers."""

import os
from pathlib import Path

import pytest

from deepswe.cores import usable_cores


@pytest.fixture(autouse=True)
def sixty_four_visible(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)


def v2(root: Path, group: str, limits: dict[str, str], mounted: str = "/") -> Path:
    """A /proc/self whose process is in `group`; `limits` has the text of `cpu.max` by group."""
    (root / "proc").mkdir()
    (root / "proc/cgroup").write_text(f"0::{group}\n")
    (root / "proc/mountinfo").write_text(f"30 1 0:27 {mounted} {root}/groups rw - cgroup2 cgroup2 rw\n")
    for name, text in limits.items():
        place = root / "groups" / name.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpu.max").write_text(text)
    return root / "proc"


def v1(root: Path, quota: str, period: str = "100000") -> Path:
    """In a container that sees its own group alone, under the name that it has on the host."""
    (root / "proc").mkdir()
    (root / "proc/cgroup").write_text("3:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n0::/\n")
    (root / "proc/mountinfo").write_text(
        f"30 1 0:27 / /proc rw - proc proc rw\n31 1 0:28 /docker/1 {root}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    (root / "cpu").mkdir()
    (root / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (root / "cpu/cpu.cfs_period_us").write_text(f"{period}\n")
    return root / "proc"


def test_without_control_groups_all_visible_cores_are_used(tmp_path):
    assert usable_cores(tmp_path) == 64


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", 64),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000", 64),
    ],
)
def test_a_container_of_version_2_uses_its_quota(text, cores, tmp_path):
    assert usable_cores(v2(tmp_path, "/", {"/": text})) == cores


def test_the_least_quota_on_the_way_up_counts(tmp_path):
    limits = {
        "/pods": "400000 100000",
        "/pods/one": "max 100000",
        "/pods/one/own": "800000 100000",
        "/other": "1 100000",
    }
    assert usable_cores(v2(tmp_path, "/pods/one/own", limits)) == 4


@pytest.mark.parametrize(("quota", "cores"), [("-1", 64), ("200000", 2), ("25000", 1)])
def test_a_container_of_version_1_uses_its_quota(quota, cores, tmp_path):
    assert usable_cores(v1(tmp_path, quota)) == cores


@pytest.mark.parametrize("text", ["", "0 0", "many few", "1"])
def test_a_file_that_says_nothing_readable_is_no_limit(text, tmp_path):
    assert usable_cores(v2(tmp_path, "/", {"/": text})) == 64


def test_affinity_below_the_quota_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert usable_cores(v2(tmp_path, "/", {"/": "400000 100000"})) == 2
