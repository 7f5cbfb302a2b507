"""`deepswe simulate`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

STEPS = 24
"""Training steps that are simulated unless they are set."""


def simulate(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as asynchrony.max_age=4.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A TOML file of speeds and durations; without it those of 64 H100 and 32B.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="A run directory to take attempts from, and without --profile its speeds.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help=f"Training steps to simulate, {STEPS} unless set; as training.steps=N.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the recipe's scheduler in virtual time: steps an hour, how busy each part is, and which to have more of."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.config import load_recipe
    from deepswe.simulate.profile import Profile, load_profile
    from deepswe.simulate.record import read_recorded
    from deepswe.simulate.run import simulate as run

    wanted = load_recipe(recipe, [f"training.steps={steps or STEPS}", *(overrides or ())])
    assumed = load_profile(profile) if profile else None
    recorded = read_recorded(like, assumed) if like else None
    with TerminalProgress() as progress, tempfile.TemporaryDirectory(prefix="deepswe-simulate-") as scratch:
        if recorded:
            progress.say(recorded.text)
        speeds = recorded.profile if recorded else assumed or Profile()
        found = run(wanted, speeds, Path(scratch), lives=recorded.lives if recorded else None, progress=progress)
    print(json.dumps(found.as_json()) if as_json else found.text())
