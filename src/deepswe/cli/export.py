"""`deepswe export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

Form = Literal["predictions", "swe-agent", "mini-swe-agent", "atif", "submission"]


def export(
    run: Annotated[str, typer.Argument(help="RUN or RUN:PHASE.")],
    out: Annotated[
        Path, typer.Option(help="Predictions: a .jsonl or .json file, or a directory of one file a task. Else one.")
    ],
    form: Annotated[Form, typer.Option("--format", help="What to write.")] = "predictions",
    attempt: Annotated[int, typer.Option(min=0, help="Which attempt at each task.")] = 0,
    model: Annotated[str, typer.Option(help="The name under which it is submitted; empty takes the policy's.")] = "",
    site: Annotated[str, typer.Option(help="Of a submission: the project's address.")] = "",
    open_model: Annotated[bool, typer.Option("--open-model", help="Of a submission: its weights can be had.")] = False,
) -> None:
    """Write an evaluation in the formats of others: predictions, trajectories, a submission; prints the counts."""
    from deepswe.cli.places import free_place
    from deepswe.evaluation.export import (
        choose_attempt,
        predictions,
        write_predictions,
        write_submission,
        write_trajectories,
    )
    from deepswe.evaluation.export_trajectories import Exporter
    from deepswe.evaluation.results import open_evaluation

    free_place("--out", out, run)
    found = open_evaluation(run)
    chosen = choose_attempt(found.trajectories, attempt)
    exporter = Exporter(model or found.policy, found.text)
    if form == "predictions":
        write_predictions(predictions(chosen, model=exporter.model), out)
    elif form == "submission":
        write_submission(chosen, out, exporter=exporter, name=exporter.model, site=site, open_model=open_model)
    else:
        write_trajectories(chosen, out, form=form, exporter=exporter)
    empty = sum(not trajectory.artifact for trajectory in chosen)
    print(json.dumps({"format": form, "tasks": len(chosen), "without_patch": empty, "out": str(out)}))
