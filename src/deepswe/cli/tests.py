"""`deepswe tests generate` and `deepswe tests run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Write tests for tasks, and run candidates against them.", no_args_is_help=True)

RecipeFile = Annotated[Path, typer.Argument(help="A recipe (TOML) that names the tasks and the sandboxes.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change, such as run.name=tests.")]


@app.command()
def generate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="Where the tests go (JSONL), task by task.")] = Path("tests.jsonl"),
    writer: Annotated[
        Literal["script", "model"], typer.Option(help="A script that reads the issue, or the recipe's model.")
    ] = "script",
    split: Annotated[str, typer.Option(help="Which tasks.")] = "heldout",
    attempts: Annotated[int, typer.Option(min=1, help="Attempts at each task; their tests are joined.")] = 1,
    limit: Annotated[int, typer.Option(min=0, help="At most this many tasks; 0 takes all.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue if it was begun.")] = False,
) -> None:
    """Write tests that fail because of the issue, and keep those that hold on the base; prints counts as JSON."""
    from deepswe.config import load_recipe

    wanted = load_recipe(recipe, overrides or ())

    from deepswe.cli.places import free_place
    from deepswe.cli.progress import TerminalProgress
    from deepswe.session.testing import generate_tests

    free_place("--out", out, recipe)
    with TerminalProgress() as progress:
        answer = generate_tests(
            wanted,
            writer=writer,
            split=split,
            attempts=attempts,
            limit=limit,
            out=out,
            resume=resume,
            progress=progress,
        )
    print(json.dumps(answer))


@app.command()
def run(
    recipe: RecipeFile,
    overrides: Overrides = None,
    candidates: Annotated[
        Path, typer.Option("--candidates", help="A run, a predictions file, or a directory of trajectory files.")
    ] = Path("predictions.jsonl"),
    tests: Annotated[Path, typer.Option("--tests", help="What `deepswe tests generate` wrote.")] = Path("tests.jsonl"),
    scores: Annotated[Path, typer.Option("--scores", help="Score file (JSONL) to which the scores are added.")] = Path(
        "scores.jsonl"
    ),
    matrix: Annotated[Path, typer.Option("--matrix", help="Record of which patch passes which test (JSONL).")] = Path(
        "matrix.jsonl"
    ),
    phase: Annotated[str | None, typer.Option(help="Of a run: only this phase, such as after_heldout.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Runs at once; 0 takes one a core.")] = 0,
) -> None:
    """Run each patch against the tests of its task in a fresh sandbox; prints counts as JSON. Goes on where it was."""
    from deepswe.config import load_recipe

    wanted = load_recipe(recipe, overrides or ())

    from deepswe.cli.lines import warn
    from deepswe.cli.places import free_place
    from deepswe.cli.progress import TerminalProgress
    from deepswe.scaling.candidates import load_candidates
    from deepswe.scaling.scores import ScoreBook
    from deepswe.session.testing import run_tests

    free_place("--scores", scores, candidates, tests, recipe)
    free_place("--matrix", matrix, candidates, tests, recipe, scores)
    loaded, refused = load_candidates(candidates, phase=phase)
    for item in refused:
        warn(f"refused {item.place}: {item.reason}")
    with TerminalProgress() as progress:
        answer = run_tests(
            wanted,
            loaded,
            tests=tests,
            matrix=matrix,
            scores=ScoreBook.open(scores),
            workers=workers,
            progress=progress,
        )
    print(json.dumps({**answer, "refused": len(refused), "scores": str(scores)}))
