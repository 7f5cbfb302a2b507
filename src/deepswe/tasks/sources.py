"""Public task sources: each row becomes a task, or is refused with its id and the reason. Nothing is dropped silently.

    imported = import_tasks("r2e.parquet")             # a file, a directory of Harbor tasks, or a hub name
    imported.tasks, imported.refused

What a source calls its columns, how its images are named, where a repository lies in them and how it grades are facts
of its publishers; docs/sources.md tells them. The columns that hold the answer (`patch`, `test_patch`, R2E-Gym's
`prompt`, `parsed_commit_content`, `execution_result_content`, `expected_output_json`) never reach a `Task`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepswe.errors import ConfigError
from deepswe.tasks.benchmarks import is_evaluation_repository
from deepswe.tasks.sources_harbor import harbor_rows, harbor_task
from deepswe.tasks.sources_r2e import r2e_task
from deepswe.tasks.sources_rows import Row, RowRefused, hub_rows, read_rows
from deepswe.tasks.sources_swe import sweb_task, swegym_task, swerebench_task, swesmith_task
from deepswe.tasks.task import HiddenTests, Task, TaskSet

Convert = Callable[[Row], tuple[Task, HiddenTests]]
"""Makes a task of a row, or raises `RowRefused`."""

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Source:
    """One public source.

    Attributes:
        convert: row -> task.
        evaluation: its tasks are a benchmark's; training refuses them.
    """

    convert: Convert
    evaluation: bool = False


SOURCES: Mapping[str, Source] = {
    "r2e-gym": Source(r2e_task),
    "swe-bench": Source(sweb_task, evaluation=True),
    "swe-smith": Source(swesmith_task),
    "swe-gym": Source(swegym_task),
    "swe-rebench": Source(swerebench_task),
    "harbor": Source(harbor_task),
}


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that cannot be used.

    Attributes:
        id: the row's own, or "row N".
        reason: one sentence.
    """

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the rows of a source: every row is a task or refused.

    Attributes:
        rows: how many there were.
        tasks: of the rows that can be used, in order.
        refused: the others, in order.
    """

    rows: int
    tasks: TaskSet
    refused: tuple[Refused, ...]


def import_tasks(origin: str | Path, source: str = AUTO) -> Imported:
    """Read a source.

    Args:
        origin: a JSONL, JSON or Parquet file, a directory with Harbor tasks, or, where no such path exists, the name of
            a data set of the hub, as `owner/name` or `owner/name:split`.
        source: a key of `SOURCES`; "auto" tells each row by its columns.

    Raises:
        StoreError: the file cannot be read at all.
        ConfigError: the source is unknown, or a library is not installed.
    """
    if source != AUTO and source not in SOURCES:
        raise ConfigError(f"source {source!r} is unknown; there are {', '.join((AUTO, *SOURCES))}")
    path = Path(origin)
    if path.is_dir():
        return import_rows(harbor_rows(path), "harbor")
    name = str(origin)
    if not path.exists() and name.count("/") == 1 and not path.suffix:
        return import_rows(hub_rows(name), source)
    return import_rows(read_rows(path), source)


def import_rows(rows: Iterable[Row], source: str = AUTO) -> Imported:
    """Make tasks of rows; see `import_tasks`."""
    tasks: list[Task] = []
    hidden: dict[str, HiddenTests] = {}
    refused: list[Refused] = []
    count = 0
    for row in rows:
        count += 1
        try:
            task, tests = _convert(row, source)
            if task.id in hidden:
                raise RowRefused("an earlier row has the same id")
        except RowRefused as error:
            refused.append(Refused(row.id, str(error)))
            continue
        tasks.append(task)
        hidden[task.id] = tests
    return Imported(count, TaskSet(tuple(tasks), hidden), tuple(refused))


def _convert(row: Row, source: str) -> tuple[Task, HiddenTests]:
    if row.problem:
        raise RowRefused(row.problem)
    return SOURCES[detect_source(row) if source == AUTO else source].convert(row)


def detect_source(row: Row) -> str:
    """The source of a row, by its columns. A row that could be a benchmark's counts as one.

    Raises:
        RowRefused: no source has such rows.
    """
    if row.has("expected_output_json") or row.has("repo_name", "docker_image"):
        return "r2e-gym"
    if row.has("instruction", "test_sh"):
        return "harbor"
    if not row.has("instance_id") or not (row.has("repo") or row.has("image_name")):
        known = ", ".join(sorted(row.record)[:8]) or "none"
        raise RowRefused(f"no source has rows with these columns ({known}); it needs a statement, tests and an image")
    if row.has("image_name") or row.optional_text("repo").startswith("swesmith/"):
        return "swe-smith" if not row.has("test_patch") else "swe-rebench"
    if row.has("install_config"):
        return "swe-rebench"
    if row.has("eval_script") or row.has("run_tests") or is_evaluation_repository(row.optional_text("repo")):
        return "swe-bench"
    return "swe-gym"
