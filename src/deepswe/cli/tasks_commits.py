"""`deepswe tasks commits`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def commits(
    source: Annotated[str, typer.Argument(help="Path or URL of a git repository.")],
    out: Annotated[Path, typer.Option(help="The task set to write: .parquet, .jsonl.zst or .jsonl.")],
    name: Annotated[str, typer.Option(help="Name of the repository; by default the end of its path.")] = "",
    tip: Annotated[str, typer.Option(help="Branch, tag or commit to walk back from.")] = "HEAD",
    tasks: Annotated[int, typer.Option(min=0, help="Stop after this many tasks; 0 searches on.")] = 0,
    commits: Annotated[int, typer.Option(min=0, help="Look at this many commits; 0 looks at all.")] = 0,
    first_parent: Annotated[bool, typer.Option("--first-parent", help="Take each merge as one change.")] = False,
    dated: Annotated[bool, typer.Option("--dated", help="Packages of the commit's quarter, not today's.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side; a test counts where they agree.")] = 1,
    split: Annotated[str, typer.Option(help="Split of the whole repository.")] = "train",
    workers: Annotated[int, typer.Option(min=0, help="Runs at once; 0 takes one a core.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the search if it was begun.")] = False,
) -> None:
    """Make tasks of the commits of a repository that made tests pass; prints counts by verdict as JSON."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.tasks.layers import LayerCache
    from deepswe.tasks.synth.commits import CommitPlan
    from deepswe.tasks.synth.commits_run import commits_to_tasks

    plan = CommitPlan(
        tip=tip,
        tasks=tasks,
        commits=commits,
        first_parent=first_parent,
        dated=dated,
        repeats=repeats,
        workers=workers,
    )
    with TerminalProgress() as progress:
        found = commits_to_tasks(
            source, out, plan, LayerCache.default(), progress, name=name, split=split, resume=resume
        )
    row = {"candidates": found.candidates, "tasks": len(found.rows), "valid_share": round(found.valid_share, 3)}
    print(json.dumps({**row, "verdicts": found.verdicts, "out": str(out)}))
