"""`deepswe simulate`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def simulate(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as asynchrony.max_age=4.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A TOML file of speeds and durations; without it those of 64 H100 and 32B.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="A run directory whose attempts say how long turns and tools take.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, max=100_000, help="Training steps to simulate.")] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the recipe's scheduler in virtual time: steps an hour, how busy each part is, and which to have more of."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.config import load_recipe
    from deepswe.simulate.profile import Profile, load_profile, recorded_lives
    from deepswe.simulate.run import simulate as run

    wanted = load_recipe(recipe, [*(overrides or ()), f"training.steps={steps}"])
    assumed = load_profile(profile) if profile else Profile()
    lives = recorded_lives(like) if like else None
    with TerminalProgress() as progress, tempfile.TemporaryDirectory(prefix="deepswe-simulate-") as scratch:
        found = run(wanted, assumed, Path(scratch), lives=lives, progress=progress)
    print(json.dumps(found.as_json()) if as_json else found.text())
