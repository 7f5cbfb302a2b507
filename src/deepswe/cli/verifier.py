"""`deepswe verifier train` and `deepswe verifier score`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Train a model that tells right patches from wrong ones, and let it score candidates.", no_args_is_help=True
)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe of a verifier (TOML), such as recipes/verifier.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as training.epochs=1.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training if it was begun.")] = False,
) -> None:
    """Train a verifier on judged attempts; prints counts and its calibration on held-out groups as JSON."""
    from deepswe.scaling.verifier_recipe import load_verifier_recipe

    wanted = load_verifier_recipe(recipe, overrides or ())  # a wrong recipe is told before torch is imported

    from deepswe.cli.progress import TerminalProgress
    from deepswe.session.verifier import train_verifier

    with TerminalProgress() as progress:
        answer = train_verifier(wanted, resume=resume, progress=progress)
    print(json.dumps(answer))


@app.command()
def score(
    candidates: Annotated[
        Path, typer.Argument(help="A run, a predictions file (JSON, JSONL), or a directory of trajectory files.")
    ],
    scores: Annotated[Path, typer.Option("--scores", help="Score file (JSONL) to which the scores are added.")],
    verifier: Annotated[Path | None, typer.Option(help="Run directory of a trained verifier.")] = None,
    url: Annotated[str, typer.Option(help="Instead: an OpenAI-compatible endpoint with log-probs, such as vLLM.")] = "",
    model: Annotated[str, typer.Option(help="The model's name at that endpoint.")] = "",
    style: Annotated[
        Literal["full", "brief"], typer.Option(help="How the endpoint is asked: with instructions, or texts alone.")
    ] = "full",
    budget: Annotated[int, typer.Option(min=1, help="Tokens of a prompt for the endpoint, about.")] = 24_000,
    phase: Annotated[
        str | None, typer.Option("--phase", help="Of a run: only this phase, such as after_heldout.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Task-set file (or bundled, micro) with the issues, where candidates have none.")
    ] = "",
) -> None:
    """Give each candidate the probability that it is right; prints counts as JSON. Goes on where it was stopped."""
    from deepswe.cli.lines import warn
    from deepswe.cli.places import free_place
    from deepswe.cli.progress import TerminalProgress
    from deepswe.errors import ConfigError
    from deepswe.scaling.candidates import load_candidates
    from deepswe.scaling.scores import ScoreBook
    from deepswe.scaling.verifier_api import ApiJudge, Endpoint

    if (verifier is None) == (not url) or bool(url) != bool(model):
        raise ConfigError("give --verifier DIRECTORY, or --url and --model; not both")
    free_place("--scores", scores, candidates, *filter(None, (tasks,)))
    loaded, refused = load_candidates(candidates, phase=phase)
    book = ScoreBook.open(scores)
    for item in refused:
        warn(f"refused {item.place}: {item.reason}")
    from deepswe.evaluation.validation import load_target
    from deepswe.session.verifier import load_verifier, score_candidates, with_issues

    with TerminalProgress() as progress:
        known = load_target(tasks, limit=0, progress=progress).tasks if tasks else ()
        asked = with_issues(loaded, {task.id: task.problem_statement for task in known})
        judge = (
            ApiJudge(Endpoint(url, model, style=style, budget=budget)) if verifier is None else load_verifier(verifier)
        )
        answer = score_candidates(asked, judge, book, progress)
    print(json.dumps({**answer, "refused": len(refused), "scores": str(scores)}))
