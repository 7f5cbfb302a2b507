"""`deepswe rank` and `deepswe curves`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

Candidates = Annotated[
    Path, typer.Argument(help="A run, a predictions file (JSON, JSONL), or a directory of trajectory files.")
]
Book = Annotated[Path, typer.Option("--scores", exists=True, dir_okay=False, help="Scores of the candidates (JSONL).")]
Phase = Annotated[str | None, typer.Option("--phase", help="Of a run: only this phase, such as after_heldout.")]


def rank(
    candidates: Candidates,
    out: Annotated[Path, typer.Option("--out", help="Where the chosen patches go, as SWE-bench predictions (JSONL).")],
    scores: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Scores of the candidates (JSONL); majority needs none."),
    ] = None,
    method: Annotated[str, typer.Option(help="verifier, execution, hybrid, majority or agreement.")] = "hybrid",
    phase: Phase = None,
    model: Annotated[str, typer.Option(help="The name under which the patches are submitted.")] = "deepswe",
) -> None:
    """Choose one candidate for each task by its scores; prints the counts as JSON."""
    from deepswe.atomic import write_atomically
    from deepswe.cli.lines import warn
    from deepswe.cli.places import free_place
    from deepswe.errors import ConfigError
    from deepswe.scaling.candidates import load_candidates, prediction
    from deepswe.scaling.rank import rank as rank_candidates
    from deepswe.scaling.scores import ScoreBook
    from deepswe.scaling.select import UNSCORED

    if scores is None and method not in UNSCORED:
        raise ConfigError(f"--method {method} chooses by scores; give --scores FILE, or --method {UNSCORED[0]}")
    free_place("--out", out, candidates, *([scores] if scores else []))
    loaded, refused = load_candidates(candidates, phase=phase)
    choices = rank_candidates(loaded, ScoreBook.open(scores) if scores else ScoreBook(Path(os.devnull)), method)
    rows = (json.dumps(prediction(choice.candidate, model=model)) for choice in choices)
    write_atomically(out, "".join(row + "\n" for row in rows))
    for item in refused:
        warn(f"refused {item.place}: {item.reason}")
    print(
        json.dumps(
            {
                "tasks": len(choices),
                "candidates": len(loaded),
                "refused": len(refused),
                "unscored": sum(choice.of - choice.scored for choice in choices),
                "tied": sum(len(choice.tied) > 1 for choice in choices),
                "method": method,
                "out": str(out),
            }
        )
    )


def curves(
    candidates: Candidates,
    scores: Book,
    out: Annotated[Path, typer.Option("--out", help="Where the picture goes (PNG).")],
    k: Annotated[str, typer.Option("--k", help="Numbers of candidates, such as 1,2,4,8,16.")] = "1,2,4,8,16",
    phase: Phase = None,
    seed: Annotated[int, typer.Option(help="Of the sample of subsets, where a task has very many.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, with all intervals.")] = False,
) -> None:
    """Draw Best@K of each method under Pass@K, of candidates whose outcomes are known, and print the numbers."""
    from deepswe.analysis.scaling import curve_rows, write_scaling
    from deepswe.cli.evaluate_tables import plain, share, show
    from deepswe.cli.places import free_place
    from deepswe.errors import ConfigError
    from deepswe.evaluation.selection import TaskCandidates, advise, scaling_curve
    from deepswe.scaling.candidates import by_task, load_candidates
    from deepswe.scaling.scores import ScoreBook
    from deepswe.scaling.select import SELECTORS

    free_place("--out", out, candidates, scores, suffix=".png")
    try:
        wanted = [int(part) for part in k.split(",")]
    except ValueError as error:
        raise ConfigError(f"--k is {k!r}; give whole numbers such as 1,2,4,8,16") from error
    if min(wanted) < 1:
        raise ConfigError(f"--k is {k!r}; give numbers from 1 on, such as 1,2,4,8,16")
    loaded, _ = load_candidates(candidates, phase=phase)
    book = ScoreBook.open(scores)
    tasks = [
        TaskCandidates(task, book.scores(group), {c.name: c.outcome for c in group if c.outcome is not None})
        for task, group in by_task(loaded).items()
    ]
    points = scaling_curve(tasks, SELECTORS, wanted, seed=seed)
    write_scaling(points, out, title=f"{len(tasks)} tasks, {len(loaded)} candidates")
    advice = advise(points, "hybrid")
    if as_json:
        print(json.dumps({"points": curve_rows(points), "advice": advice, "picture": str(out)}))
        return
    rows = [
        (str(p.k), str(p.tasks), share(p.pass_at_k.mean), *(share(p.best[method].mean) for method in SELECTORS))
        for p in points
    ]
    title = "Pass@K, the ceiling, and Best@K by method"
    show(plain(title, ("K", "tasks", "Pass@K", *SELECTORS), rows), advice, f"intervals are in {out} and with --json")
