"""`deepswe sweep`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deepswe.config import Recipe
    from deepswe.evaluation.sweep import Knob
    from deepswe.session.evaluate import Actor

Values = Annotated[str, typer.Option(help="Limits of an attempt, such as 10,25,50,100.")]


def sweep(
    run: Annotated[str, typer.Argument(help="RUN or RUN:PHASE, made by `deepswe eval`.")],
    steps: Values = "",
    tokens: Values = "",
    rerun: Annotated[bool, typer.Option("--rerun", help="Evaluate anew where recorded attempts do not do.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Where a picture goes (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """The score of an evaluation under other limits: recorded attempts are cut and graded where that is valid."""
    from dataclasses import asdict

    from deepswe.cli.evaluate_live import LiveEvaluation
    from deepswe.cli.evaluate_tables import plain, share, show
    from deepswe.cli.places import free_place
    from deepswe.errors import ConfigError
    from deepswe.evaluation.evaluations import read_manifest
    from deepswe.evaluation.results import open_evaluation
    from deepswe.session.evaluate_sweep import run_sweep

    wanted: list[tuple[Knob, list[int]]] = []
    if steps:
        wanted.append(("steps", numbers(steps, "steps")))
    if tokens:
        wanted.append(("tokens", numbers(tokens, "tokens")))
    if not wanted:
        raise ConfigError("nothing to sweep; give --steps or --tokens, such as --steps 10,25,50")
    if picture is not None:
        free_place("--picture", picture, run, suffix=".png")
    with LiveEvaluation() as live:

        def actor(recipe: Recipe) -> Actor:
            from deepswe.cli.evaluate import choose

            found = open_evaluation(run)
            directory = Path(run.rpartition(":")[0] if not Path(run).exists() else run)
            return choose(recipe, read_manifest(directory)[found.phase]["policy"]["kind"], "", live)[1]

        make = actor if rerun else None
        points = [point for knob, values in wanted for point in run_sweep(run, knob, values, rerun=make, progress=live)]
    if picture is not None:
        from deepswe.optional import optional_module

        optional_module("matplotlib", "train", "draw a picture")
        from deepswe.analysis.sweep import write_sweep

        write_sweep(points, picture)
    if as_json:
        print(json.dumps([asdict(point) for point in points]))
        return
    rows = [
        (
            f"{p.knob} {p.value:,}",
            share(p.estimate.mean),
            f"{share(p.estimate.low)} to {share(p.estimate.high)}",
            *map(str, (p.kept, p.replayed, p.rerun, p.diverged)),
        )
        for p in points
    ]
    columns = ("limit", "pass@1", "95% interval", "kept", "replayed", "run anew", "diverged")
    show(plain(f"{run} under other limits", columns, rows))


def numbers(text: str, knob: str) -> list[int]:
    """The limits in a text such as 10,25.

    Raises:
        ConfigError: it is none.
    """
    from deepswe.errors import ConfigError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 40 for part in parts):
        raise ConfigError(f"--{knob} {text!r} is no list of whole numbers from 1 to 2**40, such as 10,25,50")
    return [int(part) for part in parts]
