"""metrics.jsonl: one JSON object a line, append-only, each row written once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from deepswe.errors import StoreError

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All whole rows of a metrics file; none if there is no file. A torn last line is left out.

    Raises:
        StoreError: a whole line is not a JSON object.
    """
    if not path.exists():
        return []
    rows: list[Row] = []
    data = path.read_bytes()
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise StoreError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise StoreError(f"{path}:{number} is {type(row).__name__}, not an object")
        rows.append(row)
    return rows


class RowTaker(Protocol):
    """Whatever else wants the rows; see `deepswe.training.writers`."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one.

        Raises:
            TrainingError: it cannot be taken.
        """
        ...

    def close(self) -> None:
        """No more come; flush."""
        ...


class MetricsLog:
    """The writer. A row is named by its kind, step, split and name; one that is there already is not written again.

    Args:
        path: of the file.
        mirror: gets each row that is new, after the file has it; closed with the log.
    """

    def __init__(self, path: Path, mirror: RowTaker | None = None) -> None:
        self._mirror = mirror
        self.rows = read_rows(path)
        self._known = {self._name(row) for row in self.rows}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        whole = path.read_bytes().rfind(b"\n") + 1
        os.truncate(path, whole)

    @staticmethod
    def _name(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return (row["kind"], row["step"], row.get("split"), row.get("name"))

    def write(self, row: Row) -> bool:
        """Append a row unless the log has it; whether it was appended."""
        if self._name(row) in self._known:
            return False
        os.write(self._fd, json.dumps(row, allow_nan=False).encode() + b"\n")
        self._known.add(self._name(row))
        self.rows.append(row)
        if self._mirror is not None:
            self._mirror.write(row)
        return True

    def find(self, kind: str, **fields: Any) -> list[Row]:
        """The rows of a kind whose fields have these values, in the order they were written."""
        return [row for row in self.rows if row["kind"] == kind and all(row.get(k) == v for k, v in fields.items())]

    def close(self) -> None:
        """End writing."""
        os.close(self._fd)
        if self._mirror is not None:
            self._mirror.close()
