"""`deepswe train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as training.steps=50.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run if it was begun.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write where the wall time went: model, sandboxes, learner, ours.")
    ] = False,
) -> None:
    """Run a recipe from its first task to its report; prints the path of the report."""
    from deepswe.config import load_recipe

    wanted = load_recipe(recipe, overrides or ())  # a wrong recipe is told before torch is imported

    from deepswe.cli.progress import TerminalProgress
    from deepswe.session.train import run_recipe
    from deepswe.training.sharded import rank

    with TerminalProgress() as progress:
        path = run_recipe(wanted, resume=resume, progress=progress, profile=profile)
    if rank() == 0:
        print(path)
