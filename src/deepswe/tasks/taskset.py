"""The task store: one file holds a whole task set, exactly; a set has a hash and a card.

    tasks = load_task_set(Path("mine.parquet"))     # .parquet, .jsonl.zst or .jsonl
    save_task_set(tasks, Path("mine.jsonl.zst"))    # atomic: the old file or the new one, never part of one
    task_set_hash(tasks)                            # "sha256:..." of tasks and hidden tests, in order
    task_set_card(tasks)                            # counts by source, repository, kind, difficulty, licence, runtime

Whoever makes tasks needs `TaskSet`, `Task`, `HiddenTests` and `Measured` of `deepswe.tasks.task`, and these functions.
A new field of one of the dataclasses needs a default and no change here: fields that have their default are not
written, so files and hashes from before the field stay good.

A row has the parts `task`, `hidden` and `measured`, each as its dataclass. JSONL begins with a header line
`{"deepswe_task_set": 1, "tasks": N, "hash": ...}`. Parquet keeps the header in its metadata and each field in a column
of its own, `task.id`, `hidden.fail_to_pass`, ...: text, numbers and lists of text as such, everything else as JSON.

Parquet needs pyarrow and .zst needs zstandard: `pip install "deepswe[tasks]"`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter, ValidationError

from deepswe.atomic import write_atomically
from deepswe.errors import StoreError, TaskError
from deepswe.optional import optional_module
from deepswe.regular import read_regular
from deepswe.tasks.task import HiddenTests, Measured, Task, TaskSet

FORMATS: Final = (".parquet", ".jsonl.zst", ".jsonl")
"""Endings of the names of task-set files."""
VERSION: Final = 1
_HEADER: Final = "deepswe_task_set"
_PARTS: Final[Mapping[str, type]] = {"task": Task, "hidden": HiddenTests, "measured": Measured}
_Record = dict[str, Any]


def save_task_set(tasks: TaskSet, path: Path) -> str:
    """Write a set to one file, atomically; the ending of its name says how.

    Returns:
        The set's hash.

    Raises:
        StoreError: the file cannot be written, or has another ending.
        TaskError: two tasks have one id, a task has no hidden tests, or a text is no Unicode.
        ConfigError: the library for that format is not installed.
    """
    ending = file_format(path)
    check_task_set(tasks)
    rows = list(_encode_rows(tasks))
    digest = _hash(rows)
    header = {_HEADER: VERSION, "tasks": len(rows), "hash": digest}
    data = _to_parquet(header, rows) if ending == ".parquet" else _to_jsonl(header, rows)
    if ending == ".jsonl.zst":
        data = optional_module("zstandard", "tasks", f"write {path}").ZstdCompressor(level=10).compress(data)
    try:
        write_atomically(path, data)
    except OSError as error:
        raise StoreError(f"task set {path} cannot be written: {error.strerror}; give another path") from error
    return digest


def load_task_set(path: Path) -> TaskSet:
    """Read a set back, as it was saved.

    Raises:
        StoreError: the file cannot be read, is no task set, is cut off, or was changed (its hash differs).
        ConfigError: the library for that format is not installed.
    """
    ending = file_format(path)
    try:
        data = read_regular(path)
    except OSError as error:
        raise StoreError(f"task set {path} cannot be read: {error.strerror}") from error
    if ending == ".jsonl.zst":
        data = _decompress(data, path)
    header, rows = _from_parquet(data, path) if ending == ".parquet" else _from_jsonl(data, path)
    if header.get(_HEADER) != VERSION:
        raise StoreError(f"{path} is no task set of version {VERSION}; its header is {str(header)[:200]}")
    if header.get("tasks") != len(rows):
        raise StoreError(f"{path} holds {len(rows)} tasks where its header says {header.get('tasks')}; it is cut off")
    tasks = _decode_rows(rows, path)
    digest = task_set_hash(tasks)
    if header.get("hash") != digest:
        raise StoreError(f"{path} was changed: its header says {header.get('hash')}, its content is {digest}")
    return tasks


def task_set_hash(tasks: TaskSet) -> str:
    """ "sha256:" and 64 hex digits: changes with any task, hidden test or their order, and with no measurement."""
    return _hash(_encode_rows(tasks))


def task_set_card(tasks: TaskSet) -> dict[str, Any]:
    """What is in a set.

    Returns:
        hash, tasks; counts by source, split, repository, kind, difficulty, license and verdict ("" where unknown),
        the most frequent first; evaluation (tasks that belong to a benchmark); fail_to_pass and pass_to_pass (median
        numbers a task); runtime_s {measured, total, median, max} of one grading of each.
    """
    measured = [tasks.measured.get(task.id, Measured()) for task in tasks.tasks]
    runtimes = [row.runtime_s for row in measured if row.runtime_s is not None]
    hidden = [tasks.hidden[task.id] for task in tasks.tasks]
    return {
        "hash": task_set_hash(tasks),
        "tasks": len(tasks.tasks),
        "sources": _count(task.source for task in tasks.tasks),
        "splits": _count(task.split for task in tasks.tasks),
        "repositories": _count(task.repo for task in tasks.tasks),
        "kinds": _count(task.kind for task in tasks.tasks),
        "difficulties": _count(task.tags.get("difficulty", "") for task in tasks.tasks),
        "licenses": _count(task.license for task in tasks.tasks),
        "verdicts": _count(row.verdict for row in measured),
        "evaluation": sum(task.evaluation for task in tasks.tasks),
        "fail_to_pass": _median([len(row.fail_to_pass) for row in hidden]),
        "pass_to_pass": _median([len(row.pass_to_pass) for row in hidden]),
        "runtime_s": {
            "measured": len(runtimes),
            "total": round(sum(runtimes), 3),
            "median": _median(runtimes),
            "max": max(runtimes, default=0.0),
        },
    }


def check_task_set(tasks: TaskSet) -> None:
    """Refuse a set that is not one.

    Raises:
        TaskError: two tasks have one id, or the hidden tests of one are missing or another's.
    """
    seen: set[str] = set()
    for task in tasks.tasks:
        if task.id in seen:
            raise TaskError(f"two tasks have the id {task.id!r}; give each its own")
        seen.add(task.id)
        hidden = tasks.hidden.get(task.id)
        if hidden is None or hidden.task_id != task.id:
            raise TaskError(f"task {task.id!r} has {'no' if hidden is None else 'the wrong'} hidden tests")


def _count(values: Iterable[str]) -> dict[str, int]:
    counter = Counter(values)
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0])))


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values)) if values else 0.0


def _encode_rows(tasks: TaskSet) -> Iterator[_Record]:
    for task in tasks.tasks:
        row = {"task": _encode(task), "hidden": _encode(tasks.hidden[task.id])}
        if task.id in tasks.measured:
            row["measured"] = _encode(tasks.measured[task.id])
        yield row


def _encode(value: Any) -> Any:
    """A dataclass as plain JSON values, without the fields that have their default."""
    if is_dataclass(value):
        record = {}
        for item in fields(value):
            found = getattr(value, item.name)
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if default is MISSING or found != default:
                record[item.name] = _encode(found)
        return record
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _hash(rows: Iterable[_Record]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        text = json.dumps([row["task"], row["hidden"]], sort_keys=True, separators=(",", ":"))
        digest.update(text.encode("ascii") + b"\n")
    return f"sha256:{digest.hexdigest()}"


@functools.cache
def _adapters() -> Mapping[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(part) for name, part in _PARTS.items()}


def _decode_rows(rows: Sequence[Any], path: Path) -> TaskSet:
    adapters = _adapters()
    tasks: list[Task] = []
    hidden: dict[str, HiddenTests] = {}
    measured: dict[str, Measured] = {}
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, dict):
                raise ValueError("it is no object")
            parts = {name: adapters[name].validate_python(_known(name, value)) for name, value in row.items()}
            task = parts["task"]
            tasks.append(task)
            hidden[task.id] = parts["hidden"]
            if "measured" in parts:
                measured[task.id] = parts["measured"]
        except (ValidationError, ValueError, KeyError) as error:
            raise StoreError(f"task {number} of {path} cannot be read: {error}") from error
    loaded = TaskSet(tuple(tasks), hidden, measured)
    try:
        check_task_set(loaded)
    except TaskError as error:
        raise StoreError(f"{path}: {error}") from error
    return loaded


def _known(part: str, record: Any) -> Any:
    names = {item.name for item in fields(_PARTS[part])}
    unknown = sorted(set(record) - names) if isinstance(record, dict) else []
    if unknown:
        raise ValueError(f"{part}.{unknown[0]} is not a field that this version knows")
    return record


def _to_jsonl(header: _Record, rows: Sequence[_Record]) -> bytes:
    try:
        return b"".join(_line(record) for record in (header, *rows))
    except UnicodeEncodeError as error:
        raise TaskError(f"a task has text that is no Unicode: {error}") from error


def _line(record: _Record) -> bytes:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _from_jsonl(data: bytes, path: Path) -> tuple[_Record, list[Any]]:
    *lines, rest = data.split(b"\n")
    if not lines or rest:
        raise StoreError(f"{path} is {'cut off within a line' if lines else 'no task set'}")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise StoreError(f"line {number} of {path} is no JSON: {error}") from error
    return records[0] if isinstance(records[0], dict) else {}, records[1:]


def _decompress(data: bytes, path: Path) -> bytes:
    zstandard = optional_module("zstandard", "tasks", f"read {path}")
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
            content: bytes = reader.read()
            return content
    except zstandard.ZstdError as error:
        raise StoreError(f"{path} is no zstandard file: {error}") from error


_PLAIN: Final[Mapping[Any, str]] = {str: "string", bool: "bool_", int: "int64", float: "float64"}


def _columns(arrow: Any) -> dict[str, tuple[str, str, Any]]:
    """Column name -> (part, field, Arrow type), the type None for JSON in a text column."""
    columns = {}
    for part, kind in _PARTS.items():
        for name, hint in get_type_hints(kind).items():
            arrow_type = arrow.list_(arrow.string()) if hint == tuple[str, ...] else None
            if hint in _PLAIN:
                arrow_type = getattr(arrow, _PLAIN[hint])()
            columns[f"{part}.{name}"] = (part, name, arrow_type)
    return columns


def _to_parquet(header: _Record, rows: Sequence[_Record]) -> bytes:
    arrow = optional_module("pyarrow", "tasks", "write a Parquet file")
    parquet = optional_module("pyarrow.parquet", "tasks", "write a Parquet file")
    names, arrays = [], []
    try:
        for column, (part, name, arrow_type) in _columns(arrow).items():
            values = [row.get(part, {}).get(name) for row in rows]
            if arrow_type is None:
                values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
            arrays.append(arrow.array(values, type=arrow_type or arrow.string()))
            names.append(column)
    except UnicodeEncodeError as error:
        raise TaskError(f"a task has text that is no Unicode: {error}") from error
    # A task whose measurements are all at their defaults has an empty part, which no column shows.
    names.append("measured")
    arrays.append(arrow.array(["measured" in row for row in rows], type=arrow.bool_()))
    table = arrow.Table.from_arrays(arrays, names=names)
    table = table.replace_schema_metadata({_HEADER: json.dumps(header)})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _from_parquet(data: bytes, path: Path) -> tuple[_Record, list[_Record]]:
    arrow = optional_module("pyarrow", "tasks", f"read {path}")
    parquet = optional_module("pyarrow.parquet", "tasks", f"read {path}")
    try:
        table = parquet.read_table(io.BytesIO(data))
        header = json.loads((table.schema.metadata or {}).get(_HEADER.encode(), b"{}"))
        columns = _columns(arrow)
        rows: list[_Record] = [
            {"task": {}, "hidden": {}, **({"measured": {}} if measured else {})}
            for measured in (table["measured"].to_pylist() if "measured" in table.column_names else [])
        ]
        for column in table.column_names:
            if column == "measured":
                continue
            part, _, name = column.partition(".")
            as_json = column in columns and columns[column][2] is None
            for row, value in zip(rows, table[column].to_pylist(), strict=True):
                if value is not None:
                    row.setdefault(part, {})[name] = json.loads(value) if as_json else value
    except (arrow.ArrowException, ValueError) as error:
        raise StoreError(f"{path} is no Parquet file of a task set: {error}") from error
    return header, rows


def file_format(path: Path) -> str:
    """The format of a task-set file, by its name; asked before any long work whose result goes there.

    Raises:
        StoreError: the name has none of the known endings.
    """
    for ending in FORMATS:
        if path.name.endswith(ending):
            return ending
    raise StoreError(f"{path} does not end in {', '.join(FORMATS)}; name a task-set file so")
