"""Take out of a task set what evaluation benchmarks hold: by repository, commit, patch and problem text.

The repositories of SWE-bench, Lite, Verified and Multilingual are known by name (`deepswe.tasks.benchmarks`). Commits,
patches and texts are compared with a benchmark's own rows, or with any list of a user's own: a file that
`deepswe.tasks.sources` reads, or a text file with one repository a line.

Near duplicates are found with MinHash and locality-sensitive hashing (Broder 1997; `datasketch`), tuned to let nothing
pass, and then confirmed on the sets of word triples themselves: by Jaccard similarity, or by how much of the smaller
one the larger one contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from deepswe.errors import StoreError
from deepswe.optional import optional_module
from deepswe.tasks.benchmarks import canonical_repository, load_benchmarks, same_repository
from deepswe.tasks.patches import changed_lines, touched_paths
from deepswe.tasks.sources import import_tasks
from deepswe.tasks.task import HiddenTests, Task, TaskSet

Reason = Literal["repository", "fork", "commit", "patch", "text"]
Shingles = frozenset[str]

TEXT_THRESHOLD = 0.4
PATCH_THRESHOLD = 0.6
_CONTAINMENT = 0.8
_CANDIDATE = 0.15
"""Similarity from which the hashing proposes a pair; well below both thresholds, since it estimates."""
_PERMUTATIONS = 128
_FEW = 8
"""Below this many triples two sets must be equal, and patches must also be of a file of the same name."""
_COMMIT_DIGITS = 7


@dataclass(frozen=True, slots=True)
class Item:
    """One task of a reference.

    Attributes:
        id: its name there.
        text: the problem statement.
        patch: the solution, as a unified diff.
    """

    id: str
    text: str = ""
    patch: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """What must not be trained on.

    Attributes:
        name: for reports.
        repositories: names in the spelling of `canonical_repository`.
        commits: base commits of tasks -> the id of one.
        items: the tasks themselves, where they are at hand.
    """

    name: str
    repositories: frozenset[str] = frozenset()
    commits: dict[str, str] = field(default_factory=dict)
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    """A task that was taken out.

    Attributes:
        id: of the task.
        reason: what gave it away; the first of the five that did.
        against: the reference.
        match: the repository or the task of the reference that it matches.
        score: similarity in [0, 1]; 1 for names and commits.
    """

    id: str
    reason: Reason
    against: str
    match: str
    score: float = 1.0


@dataclass(frozen=True, slots=True)
class Decontaminated:
    """The set without them, and why each is gone."""

    tasks: TaskSet
    removed: tuple[Removed, ...]


def shipped_references() -> tuple[Reference, ...]:
    """The benchmarks whose repositories are known by name."""
    return tuple(Reference(name, repos) for name, repos in load_benchmarks().repositories.items())


def read_reference(path: Path) -> Reference:
    """A list of one's own: a `.txt` file with a repository a line (`#` begins a remark), or rows of any source.

    Raises:
        StoreError: it cannot be read, or no row of it can be used.
    """
    if path.suffix == ".txt":
        try:
            lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        return Reference(path.stem, frozenset(canonical_repository(line) for line in lines if line))
    imported = import_tasks(path)
    if not imported.tasks.tasks:
        first = f"; the first is refused: {imported.refused[0].reason}" if imported.refused else ""
        raise StoreError(f"{path} has no row that can be used{first}")
    return reference_of(path.stem, imported.tasks)


def reference_of(name: str, tasks: TaskSet) -> Reference:
    """A task set as a reference."""
    return Reference(
        name,
        frozenset(canonical_repository(task.repo) for task in tasks.tasks),
        {task.base_commit.rstrip("^"): task.id for task in tasks.tasks if task.base_commit},
        tuple(Item(task.id, task.problem_statement, solution(task, tasks.hidden[task.id])) for task in tasks.tasks),
    )


def solution(task: Task, hidden: HiddenTests) -> str:
    """The diff that tells a task's bug: its gold patch, or the bug itself."""
    return hidden.gold_patch or (task.image.patch if task.image else "")


def decontaminate(tasks: TaskSet, references: Sequence[Reference]) -> Decontaminated:
    """Take out every task that matches a reference, with the first reason that is found.

    Args:
        tasks: the set.
        references: what to compare with; `shipped_references()` and lists of one's own.

    Raises:
        ConfigError: a reference has texts, and datasketch is not installed.
    """
    texts = [_Index(reference, text_shingles, lambda item: item.text, TEXT_THRESHOLD) for reference in references]
    patches = [_Index(reference, patch_shingles, lambda item: item.patch, PATCH_THRESHOLD) for reference in references]
    by_id = {task.id: task for task in tasks.tasks}
    removed: list[Removed] = []
    for name, task in by_id.items():
        diff = solution(task, tasks.hidden[name])
        checks: tuple[Iterator[Removed], ...] = (
            _by_repository(name, task.repo, references),
            _by_commit(name, task.base_commit, references),
            (Removed(name, "patch", *match) for index in patches for match in index.matches(diff)),
            (Removed(name, "text", *match) for index in texts for match in index.matches(task.problem_statement)),
        )
        found = next((match for check in checks for match in check), None)
        if found is not None:
            removed.append(found)
    gone = {row.id for row in removed}
    return Decontaminated(tasks.only([name for name in by_id if name not in gone]), tuple(removed))


def _by_repository(name: str, repo: str, references: Sequence[Reference]) -> Iterator[Removed]:
    found = [(reference, same_repository(repo, reference.repositories)) for reference in references]
    for wanted in ("same", "fork"):
        for reference, match in found:
            if match is not None and match[1] == wanted:
                yield Removed(name, "repository" if wanted == "same" else "fork", reference.name, match[0])


def _by_commit(name: str, commit: str, references: Sequence[Reference]) -> Iterator[Removed]:
    plain = commit.rstrip("^").lower()
    if len(plain) < _COMMIT_DIGITS:
        return
    for reference in references:
        for other, item in reference.commits.items():
            if len(other) >= _COMMIT_DIGITS and (plain.startswith(other.lower()) or other.lower().startswith(plain)):
                yield Removed(name, "commit", reference.name, item)


def text_shingles(text: str) -> Shingles:
    """The word triples of a text, in lower case; the words themselves where there are fewer than three."""
    return _triples(re.findall(r"[a-z0-9_]+", text.lower()))


def patch_shingles(patch: str) -> Shingles:
    """The triples of tokens of the changed lines, whatever their place, their sign and their white space.

    Names of files and directories and context lines have no part in it: a fork that was renamed keeps its changes.
    """
    lines = [text for _, text in changed_lines(patch)]
    return _triples([token for line in lines for token in re.findall(r"[A-Za-z0-9_]+|[^\sA-Za-z0-9_]", line)])


def _triples(words: Sequence[str]) -> Shingles:
    if len(words) < 3:
        return frozenset(words)
    return frozenset(" ".join(words[place : place + 3]) for place in range(len(words) - 2))


class _Index:
    """The texts, or the patches, of one reference, to be searched for near duplicates."""

    def __init__(
        self, reference: Reference, shingles: Callable[[str], Shingles], of: Callable[[Item], str], threshold: float
    ) -> None:
        self._reference, self._shingles, self._threshold = reference, shingles, threshold
        self._sources = {str(number): of(item) for number, item in enumerate(reference.items)}
        self._sets = {key: found for key, text in self._sources.items() if (found := shingles(text))}
        self._datasketch: Any = None
        if self._sets:
            self._datasketch = optional_module("datasketch", "tasks", "find near duplicates")
            self._table = self._datasketch.MinHashLSH(
                threshold=_CANDIDATE, num_perm=_PERMUTATIONS, weights=(0.05, 0.95)
            )
            for key, found in self._sets.items():
                self._table.insert(key, self._hash(found))

    def matches(self, text: str) -> Iterator[tuple[str, str, float]]:
        """(reference, item, similarity) of the items that this text nearly is, the most similar first."""
        mine = self._shingles(text)
        if not mine or self._datasketch is None:
            return
        scores = [(self._score(text, mine, key), key) for key in self._table.query(self._hash(mine))]
        for score, key in sorted(scores, reverse=True):
            if score >= self._threshold:
                yield self._reference.name, self._reference.items[int(key)].id, round(score, 3)

    def _score(self, text: str, mine: Shingles, key: str) -> float:
        other = self._sets[key]
        shared = len(mine & other)
        few = min(len(mine), len(other))
        if few < _FEW:
            return 1.0 if mine == other and _file_names(text) == _file_names(self._sources[key]) else 0.0
        contained = shared / few
        return max(shared / len(mine | other), contained if contained >= _CONTAINMENT else 0.0)

    def _hash(self, shingles: Shingles) -> Any:
        minhash = self._datasketch.MinHash(num_perm=_PERMUTATIONS, seed=1)
        minhash.update_batch([shingle.encode() for shingle in shingles])
        return minhash


def _file_names(patch: str) -> set[str]:
    return {PurePosixPath(path).name for path in touched_paths(patch)}
