"""From a repository to a task-set file with its lock: what `deepswe tasks commits` does."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from deepswe.errors import TaskError
from deepswe.jsonl import sole_writer
from deepswe.progress import Progress
from deepswe.tasks.distributions import Pip
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.lock import make_lock, write_lock
from deepswe.tasks.synth.commits import CommitPlan, CommitsFound, Record, search
from deepswe.tasks.synth.commits_history import History, open_source
from deepswe.tasks.synth.commits_tasks import assemble
from deepswe.tasks.taskset import file_format, save_task_set

RECORD = ".commits.jsonl"
LOCK = ".lock.json"
_OF_THE_WALK = ("tip", "tasks", "commits", "candidates", "workers")
"""Parts of a plan that change no verdict."""
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def repository_name(source: str) -> str:
    """The last part of a path or URL, as a plain name."""
    last = source.rstrip("/").removesuffix("/.git").removesuffix(".git").replace(":", "/").rpartition("/")[2]
    name = _NAME.sub("-", last).strip("-.")
    if not name:
        raise TaskError(f"{source!r} ends in no name; give one with --name")
    return name


def beside(out: Path, ending: str) -> Path:
    """A file that goes with a task-set file."""
    return out.with_name(out.name + ending)


def commits_to_tasks(
    source: str,
    out: Path,
    plan: CommitPlan,
    cache: LayerCache,
    progress: Progress,
    *,
    name: str = "",
    split: str = "train",
    resume: bool = False,
    pip: Pip | None = None,
) -> CommitsFound:
    """Search a history and write its tasks, their record and their lock.

    Args:
        source: path or URL of a git repository.
        out: of the task set; the record and the lock lie beside it.
        plan: how to search.
        cache: for layers and clones.
        progress: told of each candidate.
        name: of the repository; by default the end of its path.
        split: one for the whole repository.
        resume: go on with the record of a search that was cut off.
        pip: how pip is called.

    Raises:
        BuildError: the repository cannot be read.
        TaskError: no commit became a task, or there is a record that is not to be resumed. The record stays.
    """
    file_format(out)
    name = name or repository_name(source)
    path = beside(out, RECORD)
    with sole_writer(path):
        if path.exists() and not resume:
            raise TaskError(f"{path} records an earlier search; add --resume, or remove it")
        asked = {key: value for key, value in asdict(plan).items() if key not in _OF_THE_WALK}
        with History(open_source(source, cache)) as history:
            record = Record(path, {"commits": 1, "repository": name, **asked})
            found = search(history, name, plan, record, cache, progress, pip=pip)
            if not found.rows:
                words = ", ".join(f"{count} {verdict}" for verdict, count in found.verdicts.items()) or "there are none"
                raise TaskError(f"no commit of {source} became a task: {words}")
            url = source if "://" in source else ""
            tasks = assemble(found.rows, history, name, cache, progress, split=split, url=url, pip=pip)
        save_task_set(tasks, out)
        write_lock(make_lock(tasks, cache, progress, pip=pip), beside(out, LOCK))
        return found
