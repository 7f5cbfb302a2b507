"""Rows of a task source, out of a JSONL, JSON or Parquet file or the hub. A row that is broken is one refusal."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from deepswe.errors import StoreError, TaskError
from deepswe.optional import optional_module
from deepswe.regular import read_regular
from deepswe.tasks.patches import touched_paths


class RowRefused(TaskError):
    """One row cannot be used; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source, with getters that refuse what has the wrong type.

    Attributes:
        number: from 1, in its file.
        record: the columns; empty where the row could not be read.
        problem: why it could not be read; "" if it could.
    """

    number: int
    record: Mapping[str, Any]
    problem: str = ""

    @property
    def id(self) -> str:
        """The row's own name, else "row N"."""
        for column in ("instance_id", "id", "task_id"):
            value = self.record.get(column)
            if isinstance(value, str) and value:
                return value
        commit, repo = (
            self.record.get("commit_hash") or self.record.get("git_commit_hash"),
            self.record.get("repo_name"),
        )
        return f"{repo}-{commit}" if isinstance(repo, str) and isinstance(commit, str) else f"row {self.number}"

    def has(self, *columns: str) -> bool:
        """Whether all the columns are there and not null."""
        return all(self.record.get(column) is not None for column in columns)

    def text(self, *columns: str) -> str:
        """The text of the first of the columns that is there.

        Raises:
            RowRefused: none is there, or it is no text, empty, or no Unicode.
        """
        value = self.optional_text(*columns)
        if not value.strip():
            raise RowRefused(f"{columns[0]} is empty or missing")
        return value

    def optional_text(self, *columns: str) -> str:
        """The same, with "" where none is there.

        Raises:
            RowRefused: it is no text.
        """
        for column in columns:
            value = self.record.get(column)
            if value is None:
                continue
            if not isinstance(value, str):
                raise RowRefused(f"{column} is {_kind(value)}, not text")
            if any("\ud800" <= letter <= "\udfff" for letter in value):
                raise RowRefused(f"{column} is no Unicode text")
            return value
        return ""

    def patch(self, *columns: str) -> str:
        """A unified diff; "" where there is none.

        Raises:
            RowRefused: it is no text, or it names a path outside the repository.
        """
        text = self.optional_text(*columns)
        for path in touched_paths(text):
            if path.startswith("/") or ".." in PurePosixPath(path).parts:
                raise RowRefused(f"{columns[0]} names the path {path!r}, outside the repository")
        if text.strip() and not touched_paths(text):
            raise RowRefused(f"{columns[0]} is no unified diff")
        return text

    def names(self, column: str) -> tuple[str, ...]:
        """A list of names, or the JSON text of one, each name once; empty where the column is not there.

        Raises:
            RowRefused: it is something else.
        """
        value = self.json(column)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RowRefused(f"{column} is {_kind(value)}, not a list of names")
        return tuple(dict.fromkeys(value))

    def statuses(self, column: str) -> dict[str, str]:
        """A map of names to words, or the JSON text of one.

        Raises:
            RowRefused: it is not there, or something else.
        """
        value = self.json(column)
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise RowRefused(f"{column} is {_kind(value)}, not a map from test to status")
        return value

    def json(self, column: str) -> Any:
        """The value, read as JSON where it is text; None where the column is not there or empty.

        Raises:
            RowRefused: the text is no JSON.
        """
        value = self.record.get(column)
        if not isinstance(value, str):
            return value
        if not value.strip():
            return None
        try:
            return json.loads(value)
        except ValueError as error:
            raise RowRefused(f"{column} is no JSON: {error}") from error


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file: `.jsonl`, `.jsonl.zst`, `.json` (a list, one row, or a map from id to row) or `.parquet`.

    Raises:
        StoreError: the file cannot be read at all. A broken row is a `Row` with a problem.
        ConfigError: the library for the format is not installed.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    if path.name.endswith(".zst"):
        zstandard = optional_module("zstandard", "tasks", f"read {path}")
        try:
            data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
        except zstandard.ZstdError as error:
            raise StoreError(f"{path} is no zstandard file: {error}") from error
    kind = path.name.removesuffix(".zst")
    if kind.endswith(".parquet"):
        return _parquet_rows(data, path)
    if kind.endswith(".jsonl"):
        return _line_rows(data)
    if kind.endswith(".json"):
        return _json_rows(data, path)
    raise StoreError(f"{path} is no .jsonl, .jsonl.zst, .json or .parquet file, and no directory of tasks")


def hub_rows(name: str) -> Iterator[Row]:
    """The rows of a data set of the hub, `owner/name`, or `owner/name:split` (the split is "train" by default).

    Raises:
        ConfigError: the library is not installed.
        StoreError: the data set cannot be loaded.
    """
    datasets = optional_module("datasets", "datasets", f"read {name} from the hub")
    repository, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise StoreError(f"data set {name} cannot be loaded: {error}") from error
    return (Row(number, dict(record)) for number, record in enumerate(rows, 1))


def _line_rows(data: bytes) -> Iterator[Row]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield _row(number, json.loads(line))
            except ValueError as error:
                yield Row(number, {}, f"the line is no JSON: {error}")


def _json_rows(data: bytes, path: Path) -> Iterator[Row]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise StoreError(f"{path} is no JSON: {error}") from error
    if isinstance(value, dict):
        values = list(value.values())
        whole = not values or not all(isinstance(item, dict) and "problem_statement" in item for item in values)
        value = [value] if whole else [{"instance_id": name, **item} for name, item in value.items()]
    if not isinstance(value, list):
        raise StoreError(f"{path} holds {_kind(value)}, not a list of rows")
    return (_row(number, item) for number, item in enumerate(value, 1))


def _parquet_rows(data: bytes, path: Path) -> Iterator[Row]:
    arrow = optional_module("pyarrow", "tasks", f"read {path}")
    parquet = optional_module("pyarrow.parquet", "tasks", f"read {path}")
    try:
        table = parquet.read_table(io.BytesIO(data))
        return (Row(number, record) for number, record in enumerate(table.to_pylist(), 1))
    except arrow.ArrowException as error:
        raise StoreError(f"{path} is no Parquet file: {error}") from error


def _row(number: int, value: Any) -> Row:
    return Row(number, value) if isinstance(value, dict) else Row(number, {}, f"the row is {_kind(value)}, no object")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "empty or missing"}
    return names.get(type(value), f"the {type(value).__name__} {value!r}"[:60])
