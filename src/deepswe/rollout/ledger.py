"""The ledger of asynchronous rollouts: what became of each group, one JSON object a line, append-only.

    {"kind": "opened", "step": 3, "groups": [17]}         group 17 was begun while step 3 was due
    {"kind": "trained", "step": 3, "groups": [4, 9]}      step 3 trains on groups 4 and 9; written before its update
    {"kind": "dropped", "step": 3, "groups": [2]}         group 2 will never be trained; `why` says why

A group is named by its number in the order of the data. Each is opened once, and then trained once, or dropped once, or
still open. A torn last line (the process was killed in the middle of a write) is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepswe.errors import StoreError
from deepswe.jsonl import append_line, read_lines


class Ledger:
    """The writer, and what it read at the start. One writer at a time.

    Attributes:
        opened: number of a group -> the step that was due when it was begun.
        trained: step -> the numbers of its groups.
        dropped: number -> why.
        dropped_at: step -> how many groups were dropped when it was due.
    """

    def __init__(self, path: Path) -> None:
        """Read the file, which is made by the first entry.

        Raises:
            StoreError: it cannot be read, or contradicts itself.
        """
        self.path = path
        self.opened: dict[int, int] = {}
        self.trained: dict[int, tuple[int, ...]] = {}
        self.dropped: dict[int, str] = {}
        self.dropped_at: dict[int, int] = {}
        self._settled: set[int] = set()
        try:
            lines, _ = read_lines(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            try:
                self._note(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StoreError(f"{path}:{number} is no entry of this ledger: {error}") from error

    def open_group(self, number: int, step: int) -> None:
        """A group is begun while `step` is due."""
        self._write({"kind": "opened", "step": step, "groups": [number]})

    def train(self, step: int, numbers: Iterable[int]) -> None:
        """A step trains on these groups. On the disk when this returns."""
        self._write({"kind": "trained", "step": step, "groups": list(numbers)}, durable=True)

    def drop(self, step: int, numbers: Iterable[int], why: str) -> None:
        """These groups will not be trained."""
        self._write({"kind": "dropped", "step": step, "groups": list(numbers), "why": why})

    def settled(self, number: int) -> bool:
        """Whether a group was trained or dropped."""
        return number in self._settled

    def _write(self, entry: dict[str, Any], *, durable: bool = False) -> None:
        self._note(entry)
        try:
            append_line(self.path, json.dumps(entry, separators=(",", ":")).encode(), durable=durable)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}; free the disk and resume") from error

    def _note(self, entry: dict[str, Any]) -> None:
        kind, step, groups = entry["kind"], entry["step"], entry["groups"]
        if kind == "opened":
            if twice := [number for number in groups if number in self.opened]:
                raise ValueError(f"group {twice[0]} is opened twice")
            self.opened.update(dict.fromkeys(groups, step))
            return
        if twice := [number for number in groups if number in self._settled or number not in self.opened]:
            raise ValueError(f"group {twice[0]} is {kind}, but it was settled before or never opened")
        if kind == "trained":
            if step in self.trained:
                raise ValueError(f"step {step} is trained twice")
            self.trained[step] = tuple(groups)
        else:
            self.dropped.update(dict.fromkeys(groups, entry["why"]))
            self.dropped_at[step] = self.dropped_at.get(step, 0) + len(groups)
        self._settled.update(groups)
