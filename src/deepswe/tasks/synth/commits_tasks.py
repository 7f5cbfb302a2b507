"""Recorded commits as tasks: trees as layers that neighbours share, tests hidden, the code as the solution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepswe.progress import Progress
from deepswe.tasks.distributions import Pip
from deepswe.tasks.environments import build_environment
from deepswe.tasks.layers import LayerCache, layer_key
from deepswe.tasks.synth.commits import CommitRow, version_module
from deepswe.tasks.synth.commits_history import History
from deepswe.tasks.synth.commits_select import is_code_path, is_test_path
from deepswe.tasks.task import HiddenTests, Measured, Repository, Task, TaskSet

SOURCE = "commits"
SHARED_BY = 32
"""So many neighbouring tasks lean on one base layer, the tree of the oldest: no later code is ever beneath a task."""
_PLAIN_MODE = "100644"
_LEAST_TIMEOUT_S, _SLOWER = 60.0, 20.0


@dataclass(frozen=True, slots=True)
class _Tree:
    """A base layer and what differs from it."""

    base: str
    files: Mapping[str, str]
    removed: tuple[str, ...]


def assemble(
    rows: Sequence[CommitRow],
    history: History,
    name: str,
    cache: LayerCache,
    progress: Progress,
    *,
    split: str = "train",
    url: str = "",
    pip: Pip | None = None,
) -> TaskSet:
    """The tasks of a search, with their layers built.

    Args:
        rows: kept commits, newest first.
        history: of the repository that they are in.
        name: of the repository, and the beginning of the ids.
        cache: gets the layers.
        progress: told of each task.
        split: one for the whole repository.
        url: of the repository, where it has one.
        pip: how pip is called, should an environment be gone from the cache.

    Raises:
        BuildError: a layer cannot be built, or the repository does not hold a commit any more.
    """
    progress.begin(f"Tasks of {name}", len(rows))
    tasks: list[Task] = []
    hidden: dict[str, HiddenTests] = {}
    measured: dict[str, Measured] = {}
    for start in range(0, len(rows), SHARED_BY):
        group = rows[start : start + SHARED_BY]
        anchor = history.tree(f"{group[-1].commit}^")
        for row in group:
            tree = _lay_tree(history, anchor, history.tree(f"{row.commit}^"), name, cache, url)
            build_environment(row.environment, cache, pip or Pip())
            task, tests = _make(row, history, tree, name, split)
            tasks.append(task)
            hidden[task.id] = tests
            measured[task.id] = Measured(runtime_s=row.seconds)
            progress.advance(note=task.id)
    return TaskSet(tuple(tasks), hidden, measured)


def tree_key(name: str, tree: str) -> str:
    """Key of the layer of a git tree."""
    return layer_key(f"tree-{name}", {"tree": tree})


def build_tree(history: History, tree: str, name: str, cache: LayerCache, *, url: str = "") -> str:
    """The layer of a git tree, built where it is missing; returns its key.

    Args:
        history: of a repository that holds the tree.
        tree: its id.
        name: of the repository.
        cache: gets the layer.
        url: from which others can have the repository, where it has one.
    """
    key = tree_key(name, tree)
    cache.build(key, lambda place: _check_out(history, tree, place))
    cache.note(key, {"git": {"name": name, "tree": tree, "url": url}})
    return key


def _check_out(history: History, tree: str, place: Path) -> None:
    history.check_out(tree, place)
    for path in place.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(place.resolve()):
            path.unlink()


def _lay_tree(history: History, anchor: str, tree: str, name: str, cache: LayerCache, url: str) -> _Tree:
    """A tree as a difference from a shared one, or a layer of its own where text cannot say the difference."""
    old, new = history.files(anchor), history.files(tree)
    changed = {path: row for path, row in new.items() if old.get(path) != row}
    modes = {mode for path, (mode, _) in changed.items()} | {old[path][0] for path in changed if path in old}
    texts = {path: history.text(ident) for path, (_, ident) in changed.items()} if modes <= {_PLAIN_MODE} else {}
    files = {path: text for path, text in texts.items() if text is not None}
    if len(files) < len(changed):
        return _Tree(build_tree(history, tree, name, cache, url=url), {}, ())
    return _Tree(build_tree(history, anchor, name, cache, url=url), files, tuple(sorted(set(old) - set(new))))


def _make(row: CommitRow, history: History, tree: _Tree, name: str, split: str) -> tuple[Task, HiddenTests]:
    parent = history.resolve(f"{row.commit}^")
    commit = next(history.walk(row.commit, first_parent=True, limit=1))
    code = [change for change in commit.changes if is_code_path(change.path)]
    extra = {row.version_file: version_module(row.version)} if row.version_file else {}
    ident = f"{name}-{row.commit[:12]}"
    task = Task(
        id=ident,
        repo=name,
        problem_statement=row.issue,
        repository=Repository(
            base=tree.base,
            environment=row.environment.key,
            files={**tree.files, **extra},
            removed=tree.removed,
            pythonpath=row.pythonpath,
        ),
        source=SOURCE,
        split=split,
        kind="commit",
        tags={
            "files": str(len(code)),
            "lines": str(sum(change.added + change.deleted for change in code)),
            "failing_tests": str(len(row.fail_to_pass)),
            "issue_style": row.issue_style,
            "year": str(commit.time.year),
        },
        base_commit=parent,
        license=row.license,
    )
    contents = history.files(history.tree(row.commit))
    tests = {change.path: change.after for change in commit.changes if is_test_path(change.path) and change.after}
    tests |= {path: contents[path][1] for path in row.files}
    return task, HiddenTests(
        task_id=ident,
        files={path: history.blob(blob).decode() for path, blob in sorted(tests.items())},
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        arguments=row.arguments,
        timeout_s=max(_LEAST_TIMEOUT_S, _SLOWER * row.seconds),
        gold_patch=history.diff(parent, row.commit, [change.path for change in code]),
    )
