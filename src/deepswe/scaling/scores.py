"""Scores of candidates on disk: one append-only JSONL file, one line a measurement, keyed by (task, candidate).

    {"task": T, "candidate": C, "patch": KEY, "verifier": 0.83}
    {"task": T, "candidate": C, "patch": KEY, "regression": 0.95, "reproduction": {"test": true}}

Lines may come in any order and more than once; the last line of a key wins, field by field. A torn last line, left by
a process that was killed, is dropped. A measurement whose patch is no longer that of the candidate does not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepswe.errors import ConfigError, StoreError
from deepswe.jsonl import append_line, read_lines
from deepswe.scaling.candidates import Candidate
from deepswe.scaling.select import Scores
from deepswe.shapes import misfit_in_record

Key = tuple[str, str, str]
"""(task, candidate, patch)."""

_BEGINNING = b'{"task":'
"""How every line begins that `append` writes."""

_KEY: Mapping[str, Any] = {"task": str, "candidate": str, "patch": str}
_VALUES: Mapping[str, Any] = {"verifier": float, "regression": float, "reproduction": Mapping[str, bool]}
"""What every line has, and what it may have."""


@dataclass(slots=True)
class ScoreBook:
    """All measurements that were made; `append` writes one at once.

    Attributes:
        path: the file; it need not exist.
        rows: what is known by key.
    """

    path: Path
    rows: dict[Key, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> ScoreBook:
        """Read what is there, and change nothing.

        Raises:
            ConfigError: the file cannot be read, or a line is no measurement, nor the torn beginning of one at the end.
        """
        book = cls(path)
        try:
            lines, rest = read_lines(path)
        except OSError as error:
            raise ConfigError(f"scores {path} cannot be read: {error.strerror}; give a file of scores") from error
        if not rest.startswith(_BEGINNING[: len(rest)]):
            lines.append(rest)
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                row = json.loads(line)
                book._take(_checked(row))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{number} is no score ({error}); give a file that `deepswe` wrote") from error
        return book

    def append(self, candidate: Candidate, **values: float | Mapping[str, bool]) -> None:
        """Record `verifier`, `regression` or `reproduction` of a candidate.

        Raises:
            StoreError: it could not be written; what was written before stays.
        """
        row = {"task": candidate.task_id, "candidate": candidate.name, "patch": candidate.patch_key, **values}
        try:
            append_line(self.path, json.dumps(row, separators=(",", ":")).encode())
        except OSError as error:
            raise StoreError(f"scores cannot be written to {self.path}: {error.strerror}") from error
        self._take(row)

    def has(self, candidate: Candidate, name: str) -> bool:
        """Whether that measurement of the candidate's patch was made."""
        return name in self.rows.get((*candidate.key, candidate.patch_key), {})

    def scores(self, candidates: Iterable[Candidate]) -> tuple[Scores, ...]:
        """What a selector sees of them; a measurement that was not made is None."""
        made = []
        for candidate in candidates:
            patch = candidate.patch_key
            row = self.rows.get((*candidate.key, patch), {})
            made.append(
                Scores(candidate.name, patch, row.get("verifier"), row.get("regression"), row.get("reproduction"))
            )
        return tuple(made)

    def _take(self, row: Mapping[str, Any]) -> None:
        key = (str(row["task"]), str(row["candidate"]), str(row["patch"]))
        known = {name: row[name] for name in ("verifier", "regression", "reproduction") if name in row}
        self.rows.setdefault(key, {}).update(known)


def _checked(row: Any) -> Mapping[str, Any]:
    """The row, if it is a measurement; else a ValueError says why not."""
    wanted = {key: hint for key, hint in _VALUES.items() if isinstance(row, dict) and key in row}
    wrong = misfit_in_record(row, {**_KEY, **wanted})
    for name in ("verifier", "regression"):
        if not wrong and not math.isfinite(row.get(name, 0.0)):
            wrong = f"it.{name} is {row[name]}"
    if wrong:
        raise ValueError(wrong)
    return dict(row)
