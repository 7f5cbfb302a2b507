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
) -> None:
    """Run a recipe from its first task to its report; prints the path of the report."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.config import load_recipe
    from deepswe.session.train import run_recipe

    with TerminalProgress() as progress:
        path = run_recipe(load_recipe(recipe, overrides or ()), resume=resume, progress=progress)
    print(path)
