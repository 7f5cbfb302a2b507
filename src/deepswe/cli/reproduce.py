"""`deepswe reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment of recipes/reproduce, or the path of a .toml file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of all arms, such as training.steps=200.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds of each arm; 0 takes the experiment's own number.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Small enough for a minute; shows that it runs.")] = False,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="Another recipe for the arms to vary, such as a big one.")
    ] = None,
    directory: Annotated[Path, typer.Option("--directory", help="Where runs and the page go.")] = Path(
        "runs/reproduce"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Run an experiment over several seeds: effects with 95% intervals, and one page with the curves."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.session.reproduce import find_experiment, run_experiment

    with TerminalProgress() as progress:
        result = run_experiment(
            find_experiment(name),
            directory=directory,
            seeds=seeds,
            quick=quick,
            recipe=recipe,
            overrides=overrides or (),
            progress=progress,
        )
    if as_json:
        print(json.dumps(result))
        return
    for pair in result["comparisons"]:
        low, high = pair["ci95"]
        verdict = "shown" if pair["holds"] else "not shown"
        print(
            f"{pair['arm']} / {pair['against']}: {pair['ratio']:.2f} [{low:.2f}, {high or float('inf'):.2f}]: {verdict}"
        )
    print(result["figure"])
