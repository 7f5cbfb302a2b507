"""`deepswe tasks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deepswe.cli import tasks_commits, tasks_import, tasks_lock, tasks_rate, tasks_synth, tasks_validate

app = typer.Typer(help="What is to be solved.", no_args_is_help=True)
app.command("import")(tasks_import.import_)
app.command()(tasks_import.decontaminate)
app.command()(tasks_synth.synth)
app.command()(tasks_synth.grow)
app.command()(tasks_commits.commits)
app.command()(tasks_validate.validate)
app.command()(tasks_lock.lock)
app.command()(tasks_lock.restore)
app.command()(tasks_rate.rate)
app.command()(tasks_rate.split)


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change.")] = None,
) -> None:
    """Build the recipe's tasks into the cache, after which they need no network; prints counts as JSON."""
    from deepswe.config import load_recipe

    wanted = load_recipe(recipe, overrides or ())  # a wrong recipe is told before the rest is imported

    from deepswe.cli.progress import TerminalProgress
    from deepswe.session.looking import count_tasks

    with TerminalProgress() as progress:
        print(json.dumps(count_tasks(wanted, progress=progress)))


@app.command()
def show(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    task: Annotated[str, typer.Argument(help="A task id.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change.")] = None,
) -> None:
    """Print what the agent is told of a task."""
    from deepswe.config import load_recipe

    wanted = load_recipe(recipe, overrides or ())

    from deepswe.session.looking import task_text

    print(task_text(wanted, task))
