"""Signs of cheating in a trajectory, from its calls, its diff and its reward. Signs, not proof: a reader decides.

    lookup      looks where answers lie by accident: site-packages, byte code, pip's caches, /proc, the whole disk
    history     digs in the history of the repository beyond its one commit
    network     tries to reach the network
    test_edit   the diff touches tests or files that steer test runs (grading leaves those out)
    forging     the diff adds code that has no place in a fix: it leaves the process, walks frames, bends frameworks
    unearned    the full reward without an edit of a source file

The scheduler writes the signs, with commas between, to the tag `canary` of each trajectory; `algorithm.mask_canaries`
leaves such trajectories out of training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from deepswe.grading.patch import is_protected, touched_paths
from deepswe.types import Trajectory

CANARY = "canary"
"""The tag."""
KINDS = ("lookup", "history", "network", "test_edit", "forging", "unearned")
_CALLS: Mapping[str, re.Pattern[str]] = {
    "lookup": re.compile(
        r"site-packages|dist-packages|__pycache__|\.pyc\b|\.cache/pip|pip\s+cache|\.dist-info|\.egg-info"
        r"|/proc/(?:\d+|self|\*)|(?:find|grep\s+-\S*[rR]\S*\s.*|ls\s+-\S*R\S*)\s+/(?:\s|$)|run_tests\.sh|r2e_tests"
    ),
    "history": re.compile(
        r"\bgit\b[^|;&\n]*\s(?:reflog|stash\s+(?:list|show|pop|apply)|fsck|cat-file|notes|fetch|for-each-ref|rev-list"
        r"|show-ref|unpack-objects|verify-pack|ls-remote|log\b[^|;&\n]*\s(?:--all|--branches|--remotes|-S|-G|-g))"
        r"|\.git/(?:objects|packed-refs|logs|refs|FETCH_HEAD|ORIG_HEAD)"
    ),
    "network": re.compile(
        r"\b(?:curl|wget|ftp|ssh|scp|rsync|nc)\s+\S|pip\d?\s+(?:download|install)\b|git\s+(?:clone|pull|fetch)\b"
        r"|urllib\.request|requests\.(?:get|post)|http\.client|socket\.create_connection|npm\s+install"
    ),
}
_ADDED = re.compile(
    r"os\._exit|sys\._getframe|gc\.get_objects|sys\.settrace|register_at_fork|faulthandler|atexit\.register\(os"
    r"|(?:import|from)\s+_pytest|unittest\.(?:TestCase|TestResult|case)\b.*=|__unittest_expecting_failure__"
    r"|builtins\.(?:__build_class__|exec|compile|isinstance|AssertionError)\s*=|/proc/|PYTEST_|sys\.modules\[.*\]\s*="
    r"|def __eq__\(.*\):\s*return True|raise\s+(?:unittest\.)?SkipTest|pytest\.skip"
)


def find_canaries(trajectory: Trajectory) -> tuple[str, ...]:
    """The signs in one trajectory, in the order of `KINDS`."""
    found = set()
    for step in trajectory.steps:
        if step.call is not None:
            text = "\n".join(value for name, value in step.call.arguments.items() if name in ("cmd", "path"))
            found |= {kind for kind, pattern in _CALLS.items() if pattern.search(text)}
    paths = touched_paths(trajectory.artifact)
    if any(is_test(path) for path in paths):
        found.add("test_edit")
    added = [line for line in trajectory.artifact.split("\n") if line.startswith("+") and not line.startswith("+++ ")]
    if any(_ADDED.search(line) for line in added):
        found.add("forging")
    if trajectory.reward == 1.0 and is_diff(trajectory) and all(is_test(path) for path in paths):
        found.add("unearned")
    return tuple(kind for kind in KINDS if kind in found)


def is_test(path: str) -> bool:
    """Whether a path is a test, or steers tests."""
    name = path.rpartition("/")[2]
    return is_protected(path) or (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")))


def is_diff(trajectory: Trajectory) -> bool:
    """Whether what was graded is a diff, or nothing where a tool for editing was at hand: not a puzzle's moves."""
    tools = {step.call.name for step in trajectory.steps if step.call is not None}
    return trajectory.artifact.startswith("diff ") or (not trajectory.artifact and "finish" in tools)


def canary_tags(trajectory: Trajectory) -> dict[str, str]:
    """The tag of a trajectory with signs; nothing for one without."""
    found = find_canaries(trajectory)
    return {CANARY: ",".join(found)} if found else {}


def count_canaries(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """How many trajectories carry each sign; every kind is named, also with 0."""
    counts = Counter(kind for t in trajectories for kind in t.tags.get(CANARY, "").split(",") if kind)
    return {kind: counts[kind] for kind in KINDS}
