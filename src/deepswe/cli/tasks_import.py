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
    from deepswe.errors import TaskError
    from deepswe.tasks.sources import import_tasks
    from deepswe.tasks.taskset import save_task_set

    imported = import_tasks(origin, source)
    refused = [{"id": row.id, "reason": row.reason} for row in imported.refused]
    answer: dict[str, object] = {"rows": imported.rows, "tasks": len(imported.tasks.tasks), "refused": refused}
    if out is not None and imported.tasks.tasks:
        answer["hash"] = save_task_set(imported.tasks, out)
    if as_json:
        print(json.dumps(answer))
    else:
        for row in imported.refused:
            print(f"refused {row.id}: {row.reason}")
        print(f"{imported.rows} rows, {len(imported.tasks.tasks)} tasks, {len(refused)} refused")
    if not imported.tasks.tasks:
        raise TaskError(f"{origin} holds no usable task, so nothing is written; see the reasons above")
    if out is not None and not as_json:
        print(f"{out}  {answer['hash']}")


def decontaminate(
    tasks: Annotated[Path, typer.Argument(metavar="SET", help="A task set: .parquet, .jsonl.zst or .jsonl.")],
    against: Annotated[
        list[Path] | None, typer.Option(help="Rows of a benchmark, or a .txt list of repositories; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write what is left there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """Take out what SWE-bench, Lite, Verified, Multilingual and your own lists hold; says what is gone and why."""
    from dataclasses import asdict

    from deepswe.tasks.decontaminate import decontaminate as take_out
    from deepswe.tasks.decontaminate import read_reference, shipped_references
    from deepswe.tasks.taskset import load_task_set, save_task_set

    whole = load_task_set(tasks)
    answer = take_out(whole, [*shipped_references(), *map(read_reference, against or ())])
    removed = [asdict(row) for row in answer.removed]
    report: dict[str, object] = {"tasks": len(whole.tasks), "kept": len(answer.tasks.tasks), "removed": removed}
    if out is not None:
        report["hash"] = save_task_set(answer.tasks, out)
    if as_json:
        print(json.dumps(report))
        return
    for row in answer.removed:
        print(f"removed {row.id}: {row.reason} of {row.against}, {row.match} ({row.score:.2f})")
    print(f"{len(whole.tasks)} tasks, {len(answer.tasks.tasks)} kept, {len(removed)} removed")
