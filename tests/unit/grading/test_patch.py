from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deepswe.grading.patch import (
    apply_options,
    can_fill_disk,
    is_machine_failure,
    is_protected,
    refusal,
    touched_paths,
    unquote,
)
from deepswe.tasks.task import HiddenTests

GOLD = "diff --git a/setup.cfg b/setup.cfg\n--- a/setup.cfg\n+++ b/setup.cfg\n@@ -0,0 +1 @@\n+x\n"
HIDDEN = HiddenTests("t", {"checks/test_a.py": ""}, ("checks/test_a.py::x",), (), gold_patch=GOLD)


def new_file(name: str, text: str = "x", mode: str = "100644") -> str:
    lines = text.split("\n")
    body = "".join(f"+{line}\n" for line in lines)
    return (
        f"diff --git {name} {name}\nnew file mode {mode}\n--- /dev/null\n+++ {name}\n@@ -0,0 +1,{len(lines)} @@\n{body}"
    )


def applied(patch: str, path: Path) -> set[str]:
    """What git makes of a patch under our options."""
    (path / "p").write_bytes(patch.encode())
    command = ["git", "apply", "--allow-empty", *apply_options(HIDDEN), "p"]
    subprocess.run(command, cwd=path, check=True, capture_output=True)
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {"p"}


def test_only_what_does_not_steer_tests_is_applied_however_its_name_is_written(tmp_path: Path) -> None:
    kept = ["src/a.py", "testing.py", "setup.cfg", "\u00fc/b c.py"]
    refused = ["checks/test_a.py", "conftest.py", "p/conftest.py", "tests/x.py", "a/test/y.py", "tox.ini", "test"]
    refused += ["sitecustomize.py", "a/b.pth", "evil-1.dist-info/entry_points.txt", "q/evil.egg-info/x", "pytest.ini"]
    patch = "".join(new_file(f"b/{name}") for name in [*kept, *refused])
    patch += new_file('"b/\\143onftest.py"') + new_file("other/tox.ini") + new_file('"b/usercustomi\\172e.py"')
    assert applied(patch, tmp_path) == set(kept)
    assert all(is_protected(name) for name in refused[1:])
    assert not any(is_protected(name) for name in [*kept[:2], kept[3]])


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (new_file("b/link", "/etc/passwd", "120000"), "out of the tree"),
        (new_file("b/a/link", "../../x", "120000"), "out of the tree"),
        (new_file("b/a/link", "b/../../../x", "120000"), "out of the tree"),
        (new_file("b/link", ".git/config", "120000"), "out of the tree"),
        (new_file("b/sub", "Subproject commit " + "0" * 40, "160000"), "no regular file"),
        (new_file("b/odd", "x", "0120000"), "no regular file"),
        (new_file("b/odd", "x", "104755"), "no regular file"),
        ("diff --git a/x b/x\nold mode 100644\nnew mode 120000\n", "no regular file"),
        (new_file("b/big", "x" * (17 << 20)), "more than"),
        ("nothing", "names no file"),
    ],
)
def test_patches_that_are_not_applied(patch: str, says: str) -> None:
    assert says in refusal(patch, HIDDEN)


def test_patches_that_are_applied() -> None:
    for patch in (
        new_file("b/run", "x", "100755"),
        new_file("b/a/link", "../c", "120000"),
        new_file("b/x", "new mode 1"),
    ):
        assert refusal(patch, HIDDEN) == ""
    assert refusal("diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", HIDDEN) == ""


def test_names_are_read_as_git_writes_them() -> None:
    assert unquote('"a/\\303\\274\\t\\"x"') == 'a/\u00fc\t"x'
    moved = "diff --git a/old.py b/new.py\nsimilarity index 100%\nrename from old.py\nrename to new.py\n"
    assert touched_paths(moved) == {"old.py", "new.py"}
    assert touched_paths(GOLD) == {"setup.cfg"}
    assert can_fill_disk("GIT binary patch")
    assert not can_fill_disk(GOLD)


@pytest.mark.parametrize(
    ("words", "machine"),
    [
        ("error: unable to write file 'a.py': Input/output error", True),
        ("fatal: Out of memory, malloc failed (tried to allocate 10 bytes)", True),
        ("error: x\nfatal: cannot fork() for git: Resource temporarily unavailable", True),
        ("error: patch failed: src/fork.py:3\nerror: src/fork.py: patch does not apply", False),
        ("error: a: Input/output error: already exists in working directory", False),
    ],
)
def test_a_patch_that_names_a_failure_of_the_machine_is_none(words: str, machine: bool) -> None:
    assert is_machine_failure(words) is machine
