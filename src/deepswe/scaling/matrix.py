"""Which candidate passes which test: run in fresh sandboxes, recorded as they end, and turned into scores.

The record is append-only JSONL, one line a (task, patch, checks); what is in it is not run again. Candidates with the
same patch are run once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deepswe.cores import usable_cores
from deepswe.errors import ConfigError, StoreError
from deepswe.grading.tree import Workshop
from deepswe.jsonl import append_line, begin_so, read_lines
from deepswe.progress import Progress
from deepswe.scaling.candidates import Candidate
from deepswe.scaling.checks import Checks, observe
from deepswe.scaling.scores import ScoreBook
from deepswe.shapes import misfit
from deepswe.tasks.task import Task
from deepswe.types import Ungraded

_BEGINNING = b'{"task":'
"""How every line begins."""


@dataclass(frozen=True, slots=True)
class Row:
    """One patch under the checks of its task.

    Attributes:
        task, patch, checks: the key: the task, the normalised patch's key, the checks' key.
        statuses: test id -> status.
        problem: why no test counts, or "".
        wall_s: seconds in the sandbox and around it.
    """

    task: str
    patch: str
    checks: str
    statuses: Mapping[str, str]
    problem: str = ""
    wall_s: float = 0.0


@dataclass(slots=True)
class Matrix:
    """The record of all runs.

    Attributes:
        path: the file; it need not exist.
        rows: by (task, patch, checks).
    """

    path: Path
    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Matrix:
        """Read what is there, and change nothing.

        Raises:
            ConfigError: it cannot be read, or a line is no row, nor the torn beginning of one at the end.
        """
        matrix = cls(path)
        try:
            lines, rest = read_lines(path)
        except OSError as error:
            raise ConfigError(f"matrix {path} cannot be read: {error.strerror}; give another file") from error
        if not begin_so(lines, rest, _BEGINNING):
            raise ConfigError(f"{path} is no matrix of candidates and tests; give another file")
        for number, line in enumerate(lines, start=1):
            if line:
                try:
                    row = Row(**json.loads(line))
                    if wrong := misfit(row, Row):
                        raise ValueError(wrong)
                    matrix._hold(row)
                except (ValueError, TypeError, RecursionError) as error:
                    raise ConfigError(f"{path}:{number} is no row of a matrix ({error}); give another file") from error
        return matrix

    def add(self, row: Row) -> None:
        """Keep a row, written before this returns.

        Raises:
            StoreError: it could not be written; what was written before stays.
        """
        try:
            append_line(self.path, json.dumps(asdict(row), separators=(",", ":")).encode())
        except OSError as error:
            raise StoreError(f"the matrix {self.path} cannot be written: {error.strerror}") from error
        self._hold(row)

    def find(self, candidate: Candidate, checks: Checks) -> Row | None:
        """The run of a candidate's patch."""
        return self.rows.get((candidate.task_id, candidate.patch_key, checks.key))

    def _hold(self, row: Row) -> None:
        self.rows[row.task, row.patch, row.checks] = row


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of candidates.

    Attributes:
        candidates: with checks.
        unchecked: whose task has no checks.
        runs: made now, one for each different patch.
        known: patches that had been run before.
        failures: what the infrastructure ended, by task; these candidates have no score.
    """

    candidates: int
    unchecked: int
    runs: int
    known: int
    failures: tuple[tuple[str, str], ...]


async def run_candidates(
    candidates: Sequence[Candidate],
    tasks: Mapping[str, Task],
    checks: Mapping[str, Checks],
    matrix: Matrix,
    workshop: Workshop,
    progress: Progress,
    *,
    workers: int = 0,
) -> Ran:
    """Run each different patch once under its task's checks, in a fresh sandbox, and record it.

    Args:
        candidates: of any of the tasks.
        tasks: task id -> the public part.
        checks: task id -> checks.
        matrix: has the runs of before, and gets the new ones.
        workshop: where sandboxes come from.
        progress: told of each run.
        workers: runs at once; 0 takes one a core.

    Raises:
        ConfigError: a candidate is of a task that is not there.
    """
    if stray := next((c for c in candidates if c.task_id not in tasks), None):
        raise ConfigError(f"candidate {stray.name} is of task {stray.task_id!r}, which is none of the recipe's tasks")
    checked = [c for c in candidates if c.task_id in checks and checks[c.task_id].tests]
    distinct = {(c.task_id, c.patch_key): c for c in sorted(checked, key=lambda c: c.key, reverse=True)}
    todo = [c for c in distinct.values() if matrix.find(c, checks[c.task_id]) is None]
    failures: list[tuple[str, str]] = []
    progress.begin("candidates under tests", len(todo))
    waiting = iter(todo)

    async def worker() -> None:
        for candidate in waiting:
            begun, wanted = time.monotonic(), checks[candidate.task_id]
            found = await observe(candidate.patch, tasks[candidate.task_id], wanted.as_tests(), workshop)
            if isinstance(found, Ungraded):
                failures.append((candidate.task_id, found.error))
            else:
                wall_s = round(time.monotonic() - begun, 3)
                key = (candidate.task_id, candidate.patch_key, wanted.key)
                matrix.add(Row(*key, found.statuses, found.problem[:500], wall_s))
            progress.advance(note=candidate.task_id)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(workers or usable_cores(), len(todo))):
            group.create_task(worker())
    unchecked = len(candidates) - len(checked)
    return Ran(len(checked), unchecked, len(todo), len(distinct) - len(todo), tuple(sorted(failures)))


def score_runs(candidates: Iterable[Candidate], checks: Mapping[str, Checks], matrix: Matrix, book: ScoreBook) -> int:
    """Write the scores that follow from the matrix; returns how many candidates have none.

    `regression` is the share of the repository's own tests that pass, and is left out where there are none;
    `reproduction` says of each generated test whether it passes. Only the exact status "passed" passes. A score that
    is in the book already is not written again.
    """
    missing = 0
    for candidate in candidates:
        wanted = checks.get(candidate.task_id)
        row = matrix.find(candidate, wanted) if wanted is not None else None
        if wanted is None or row is None:
            missing += 1
            continue
        passes = {test: row.statuses.get(test) == "passed" for test in wanted.tests}
        reproduction = {test: passes[test] for test in wanted.generated}
        known = book.scores([candidate])[0]
        if wanted.regression:
            share = sum(passes[test] for test in wanted.regression) / len(wanted.regression)
            if known.regression != share:
                book.append(candidate, regression=share)
        if reproduction and known.reproduction != reproduction:
            book.append(candidate, reproduction=reproduction)
    return missing
