"""metrics.jsonl: one JSON object a line, append-only, each row written once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from deepswe.errors import StoreError
from deepswe.jsonl import append_line, read_lines
from deepswe.shapes import misfit_in_record

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All whole rows of a metrics file; none if there is no file. A torn last line is left out.

    Raises:
        StoreError: a whole line is no object with a kind and a step.
    """
    rows: list[Row] = []
    for number, line in enumerate(read_lines(path)[0], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path}:{number} is not JSON: {error}") from error
        if wrong := misfit_in_record(row, {"kind": str, "step": int}):
            raise StoreError(f"{path}:{number} is no row of a run's metrics: {wrong}")
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
        self._path, self._mirror = path, mirror
        self.rows = read_rows(path)
        self._known = {self._name(row) for row in self.rows}

    @staticmethod
    def _name(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return (row["kind"], row["step"], row.get("split"), row.get("name"))

    def write(self, row: Row) -> bool:
        """Append a row unless the log has it; whether it was appended."""
        if self._name(row) in self._known:
            return False
        append_line(self._path, json.dumps(row, allow_nan=False).encode())
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
        if self._mirror is not None:
            self._mirror.close()
