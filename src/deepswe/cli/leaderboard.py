"""`deepswe leaderboard`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def leaderboard(
    results: Annotated[list[str], typer.Argument(help="RUN, RUN:PHASE, or a JSON file of results; NAME=... names it.")],
    size: Annotated[
        list[str] | None, typer.Option(help="NAME=BILLIONS: parameters of a model, for the picture against size.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Where a picture goes (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Runs and published results side by side, best first, with intervals and budgets."""
    from deepswe.cli.places import free_place
    from deepswe.errors import ConfigError
    from deepswe.evaluation.leaderboard import leaderboard as rank
    from deepswe.evaluation.results import load_results

    if picture is not None:
        free_place("--picture", picture, *results, suffix=".png")
    sizes: dict[str, float] = {}
    for text in size or ():
        name, _, value = text.rpartition("=")
        try:
            sizes[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--size {text!r} is not NAME=BILLIONS, such as --size ours=32") from error
        if not 0 < sizes[name] < float("inf"):
            raise ConfigError(f"--size {text!r} is no number of parameters; give billions, such as --size ours=32")
    entries = rank([load_results(spec) for spec in results], sizes)
    if picture is not None:
        from deepswe.optional import optional_module

        optional_module("matplotlib", "train", "draw a picture")
        from deepswe.analysis.ranking import write_ranking

        write_ranking(entries, picture)
    if as_json:
        print(json.dumps([entry.row() for entry in entries]))
        return

    from deepswe.cli.evaluate_tables import plain, share, show

    columns = ("", "pass@1", "95% interval", "pass@k", "tasks", "attempts", "steps", "tokens")
    lines = [
        (
            entry.name,
            share(entry.mean),
            f"{entry.low:.1%} to {entry.high:.1%}",
            "–" if entry.pass_at_k is None else f"{entry.pass_at_k:.1%} (k={entry.k})",
            str(entry.tasks),
            str(entry.attempts),
            "?" if entry.budget.steps is None else str(entry.budget.steps),
            "?" if entry.budget.tokens is None else f"{entry.budget.tokens:,}",
        )
        for entry in entries
    ]
    show(plain("Leaderboard", columns, lines))
