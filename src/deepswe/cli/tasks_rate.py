"""`deepswe tasks rate` and `deepswe tasks split`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def rate(
    task_set: Annotated[Path, typer.Argument(metavar="SET", help="A task-set file.")],
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories; without any, what is known is shown.")
    ] = None,
    phase: Annotated[str, typer.Option(help="Only phases that begin so, such as train or after.")] = "",
    add: Annotated[
        bool, typer.Option("--add", help="Add to the counts in the set, instead of replacing them.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the set there instead of into its file.")] = None,
) -> None:
    """Read the pass rates of tasks out of runs into a task set; prints bands, solve-none and solve-all as JSON."""
    from deepswe.evaluation.rate import rates_of_runs
    from deepswe.tasks.difficulty import describe_rates, with_rates
    from deepswe.tasks.taskset import load_task_set, save_task_set

    tasks = load_task_set(task_set)
    if runs:
        tasks = with_rates(tasks, rates_of_runs(runs, phase=phase), add=add)
        save_task_set(tasks, out or task_set)
    print(json.dumps(describe_rates(tasks)))


def split(
    task_set: Annotated[Path, typer.Argument(metavar="SET", help="A task-set file.")],
    heldout: Annotated[float, typer.Option(min=0, max=1, help="Share of the tasks for the split heldout.")] = 0.0,
    unseen: Annotated[float, typer.Option(min=0, max=1, help="Share of the tasks for the split unseen.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the order of the repositories.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the set there instead of into its file.")] = None,
) -> None:
    """Deal whole repositories out to splits, the rest to train; prints the number of tasks by split as JSON."""
    from collections import Counter

    from deepswe.tasks.difficulty import split_by_repository
    from deepswe.tasks.taskset import load_task_set, save_task_set

    shares = {name: share for name, share in (("heldout", heldout), ("unseen", unseen)) if share}
    tasks = split_by_repository(load_task_set(task_set), shares, seed=seed)
    save_task_set(tasks, out or task_set)
    print(json.dumps(dict(Counter(task.split for task in tasks.tasks))))
