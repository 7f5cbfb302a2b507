"""`deepswe tasks import` and `deepswe tasks decontaminate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def import_(
    origin: Annotated[str, typer.Argument(metavar="FILE", help="JSONL, JSON or Parquet, a directory, a hub name.")],
    source: Annotated[str, typer.Option(help="Which source it is; auto tells each row by its columns.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the tasks there: .parquet, .jsonl.zst or .jsonl.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """Make tasks of the rows of a public source; each row that cannot be used is told with the reason."""
    from deepswe.tasks.sources import import_tasks
    from deepswe.tasks.taskset import save_task_set

    imported = import_tasks(origin, source)
    refused = [{"id": row.id, "reason": row.reason} for row in imported.refused]
    answer: dict[str, object] = {"rows": imported.rows, "tasks": len(imported.tasks.tasks), "refused": refused}
    if out is not None:
        answer["hash"] = save_task_set(imported.tasks, out)
    if as_json:
        print(json.dumps(answer))
        return
    for row in imported.refused:
        print(f"refused {row.id}: {row.reason}")
    print(f"{imported.rows} rows, {len(imported.tasks.tasks)} tasks, {len(refused)} refused")
    if out is not None:
        print(f"{out}  {answer['hash']}")
