"""The repository's own tests, as far as an agent sees them: which of them a candidate is run against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from deepswe.errors import GradingError, boundary
from deepswe.grading.run import RUN_ENVIRONMENT
from deepswe.grading.tree import ENVIRONMENT, ROOT, Workshop, lay_tree, prepare_image
from deepswe.sandbox.base import Sandbox
from deepswe.scaling.checks import Written, find_tests, runner_of
from deepswe.tasks.bundled import is_test_module
from deepswe.tasks.task import Task

MOST_TESTS = 200
MOST_FILES = 400
"""Test modules that are looked at to find the nearest ones."""
MAX_FILE_BYTES = 1 << 20
TIMEOUT_S = 120.0
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")


async def visible_tests(task: Task, workshop: Workshop, *, limit: int = MOST_TESTS) -> Written:
    """The tests in the tree that the agent got, the modules that are nearest to the issue first.

    Args:
        task: its public part.
        workshop: where sandboxes come from; not used where all files of the task are at hand.
        limit: most tests; a module counts whole, and the first always.

    Raises:
        SandboxError: a sandbox failed.
        GradingError: the tree could not be laid or read.
    """
    if task.repository.base is None and task.image is None:
        files = {path: text for path, text in task.repository.files.items() if is_test_module(path)}
        return _chosen(
            task, files, {path: find_tests(path, text, runner_of(task)) for path, text in files.items()}, limit
        )
    async with workshop.open(task, "tests") as sandbox:
        with boundary("scaling.visible", GradingError):
            if task.image is not None:
                await prepare_image(sandbox, task.image, for_agent=True)
            await lay_tree(sandbox, task.repository)
            files = await _read_modules(sandbox)
            near = dict(list(_by_nearness(task, files).items())[: max(1, limit // 10)])
            return _chosen(task, near, await _collect(sandbox, task, list(near)), limit)


async def _read_modules(sandbox: Sandbox) -> dict[str, str]:
    command = ["find", ".", "-name", "*.py", "-type", "f", "-size", "-1024k", "-not", "-path", "./.git/*"]
    result = await sandbox.exec(command, timeout_s=TIMEOUT_S)
    paths = sorted(line.removeprefix("./") for line in result.stdout.decode("utf-8", "replace").splitlines())
    files = {}
    for path in [path for path in paths if is_test_module(path)][:MOST_FILES]:
        data = await sandbox.read_file(f"{ROOT}/{path}", max_bytes=MAX_FILE_BYTES)
        files[path] = data.decode("utf-8", "replace")
    return files


async def _collect(sandbox: Sandbox, task: Task, paths: Sequence[str]) -> dict[str, list[str]]:
    """What pytest itself finds, parameters included; nothing in the sandbox is of a candidate."""
    found: dict[str, list[str]] = {path: [] for path in paths}
    if not paths:
        return found
    python = "python" if task.repository.environment is None else f"{ENVIRONMENT}/bin/python"
    command = [python, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *paths]
    path = ":".join(f"{ROOT}/{part}".rstrip("/.") for part in task.repository.pythonpath)
    result = await sandbox.exec(command, timeout_s=TIMEOUT_S, env={**RUN_ENVIRONMENT, "PYTHONPATH": path})
    for line in result.stdout.decode("utf-8", "replace").splitlines():
        file, separator, _ = line.partition("::")
        if separator and file in found:
            found[file].append(line)
    return found


def _chosen(task: Task, files: Mapping[str, str], tests: Mapping[str, Sequence[str]], limit: int) -> Written:
    kept: dict[str, str] = {}
    ids: list[str] = []
    for path in _by_nearness(task, files):
        if tests[path] and (not ids or len(ids) + len(tests[path]) <= limit):
            kept[path] = files[path]
            ids += tests[path]
    return Written(kept, tuple(ids))


def _by_nearness(task: Task, files: Mapping[str, str]) -> dict[str, str]:
    """The files, those first that share with the issue the most words that few files have."""
    words = set(_WORD.findall(task.problem_statement))
    shared = {path: words & set(_WORD.findall(text + " " + path)) for path, text in files.items()}
    frequency = Counter(word for found in shared.values() for word in found)
    weight = {path: sum(1.0 / frequency[word] for word in sorted(found)) for path, found in shared.items()}
    return {path: files[path] for path in sorted(files, key=lambda path: (-weight[path], path))}
