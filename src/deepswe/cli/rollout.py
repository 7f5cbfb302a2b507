"""`deepswe rollout`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def rollout(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, such as run.name=try.")] = None,
    policy: Annotated[
        Literal["reference", "noop", "model"],
        typer.Option(help="The reference solver, a policy that submits nothing, or the recipe's model."),
    ] = "reference",
    split: Annotated[str, typer.Option(help="Which tasks.")] = "train",
    attempts: Annotated[int, typer.Option(min=1, help="Attempts at each task.")] = 1,
    limit: Annotated[int, typer.Option(min=0, help="At most this many tasks; 0 takes all.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run if it was begun.")] = False,
) -> None:
    """Attempt tasks through the same loop as training, without learning; prints the counts as JSON."""
    from deepswe.config import load_recipe

    wanted = load_recipe(recipe, overrides or ())

    from deepswe.cli.progress import TerminalProgress
    from deepswe.session.rollouts import run_rollouts

    with TerminalProgress() as progress:
        row = run_rollouts(
            wanted,
            actor=policy,
            split=split,
            attempts=attempts,
            limit=limit,
            resume=resume,
            progress=progress,
        )
    print(json.dumps(row))
