"""The journal of a search: one line a verdict, appended and flushed, from which an interrupted search goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepswe.errors import StoreError
from deepswe.jsonl import append_line, read_lines
from deepswe.tasks.bundled import TaskRecipe
from deepswe.tasks.synth.find import Verdict


class Journal:
    """A file of verdicts that belong to one search."""

    def __init__(self, path: Path, search: Mapping[str, Any]) -> None:
        """Name it; a journal of another search under the same name is refused when it is read.

        Args:
            path: the file.
            search: what the search is, as JSON values; stands in the first line.
        """
        self.path = path
        self.search = json.loads(json.dumps(search))

    def read(self) -> tuple[Verdict, ...]:
        """The verdicts so far; a last line that a kill cut off is dropped.

        Raises:
            StoreError: it cannot be read, or belongs to another search.
        """
        try:
            lines, _ = read_lines(self.path)
        except OSError as error:
            raise StoreError(f"journal {self.path} cannot be read: {error.strerror}") from error
        if not lines:
            return ()
        try:
            if json.loads(lines[0]) != {"search": self.search}:
                raise StoreError(f"{self.path} belongs to a search with other settings; remove it to start anew")
            return tuple(_read(json.loads(line)) for line in lines[1:])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError) as error:
            raise StoreError(f"{self.path} is no journal of a search: {error}; remove it to start anew") from error

    def add(self, verdict: Verdict) -> None:
        """Append one verdict.

        Raises:
            StoreError: the file cannot be written.
        """
        record: dict[str, Any] = {"key": verdict.key, "reason": verdict.reason}
        if verdict.task is not None:
            record["task"] = verdict.task.model_dump(mode="json", exclude_defaults=True)
        try:
            if not read_lines(self.path)[0]:
                append_line(self.path, json.dumps({"search": self.search}).encode())
            append_line(self.path, json.dumps(record).encode())
        except OSError as error:
            raise StoreError(f"journal {self.path} cannot be written: {error.strerror}") from error


def _read(record: Mapping[str, Any]) -> Verdict:
    task = record.get("task")
    return Verdict(record["key"], record["reason"], TaskRecipe.model_validate(task) if task else None)
