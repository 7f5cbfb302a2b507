"""Unified diffs as text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepswe.tasks.patches import changed_lines, diff_files, reverse_patch, touched_paths

from .source_rows import PATCH

TEXTS = st.lists(st.sampled_from(["a", "b", "-", "+", "\\", " x", "\x0c", ""]), max_size=8).map("\n".join)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=TEXTS, after=TEXTS)
def test_a_diff_applies_and_its_reverse_takes_it_back(before: str, after: str, tmp_path: Path) -> None:
    patch = diff_files(before, after, "f.txt")
    if not patch or not before or not after:
        return
    file = tmp_path / "f.txt"
    file.write_bytes(before.encode())
    for diff, text in ((patch, after), (reverse_patch(patch), before)):
        subprocess.run(["git", "apply", "--unsafe-paths", "-"], input=diff.encode(), cwd=tmp_path, check=True)
        assert file.read_bytes().decode() == text


def test_a_new_file_is_reversed_to_a_deleted_one(tmp_path: Path) -> None:
    patch = diff_files("", "one\ntwo\n", "new.txt")
    for diff, there in ((patch, True), (reverse_patch(patch), False)):
        subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, check=True)
        assert (tmp_path / "new.txt").exists() is there


def test_what_cannot_be_reversed_is_refused() -> None:
    with pytest.raises(ValueError, match="no hunk"):
        reverse_patch("")
    with pytest.raises(ValueError, match="rename"):
        reverse_patch("diff --git a/x b/y\nrename from x\nrename to y\n")


def test_paths_and_changed_lines() -> None:
    assert touched_paths(PATCH) == {"pkg/core.py"}
    assert list(changed_lines(PATCH)) == [("-", "    return a - b"), ("+", "    return a + b")]
