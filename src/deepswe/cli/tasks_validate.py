"""`deepswe tasks validate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def validate(
    target: Annotated[str, typer.Argument(help="A task-set file, or `bundled`, or `micro`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, such as sandbox.backend=docker.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Gold runs and no-op runs of each task.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Where the set goes with its verdicts; a file by default into itself.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Where each run is recorded; by default beside the set.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most this many tasks; 0 takes all.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Runs at once; 0 takes one a core.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a validation that was begun.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
) -> None:
    """Grade the gold patch and doing nothing several times: sound, flaky or unsound. Exit code 0: all is sound."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.config import load_sandbox
    from deepswe.evaluation.validation import load_target, summarise, validate_target
    from deepswe.tasks.taskset import file_format

    if out is not None:
        file_format(out)
    config = load_sandbox(overrides or ())
    with TerminalProgress() as progress:
        tasks = load_target(target, limit=limit, progress=progress)
        validations = validate_target(
            target,
            tasks,
            progress,
            runs=runs,
            workers=workers,
            out=out,
            record=record,
            resume=resume,
            sandbox=config,
        )
    answer = summarise(validations)
    if as_json:
        print(json.dumps(answer))
    else:
        for row in validations:
            if row.verdict != "sound":
                print(f"{row.verdict or 'no verdict'} {row.task_id}: {row.reason}")
        print(", ".join(f"{answer[name]} {name}" for name in ("tasks", "sound", "flaky", "unsound", "no_verdict")))
    if answer["sound"] != answer["tasks"]:
        raise typer.Exit(1)
