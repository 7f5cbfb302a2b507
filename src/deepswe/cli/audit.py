"""`deepswe audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def audit(
    tasks: Annotated[str, typer.Argument(help="bundled (with micro tasks), micro, or a task-set file.")] = "bundled",
    backend: Annotated[
        Literal["bubblewrap", "docker", "podman", "kubernetes"], typer.Option(help="Sandbox backend.")
    ] = "bubblewrap",
    attacks: Annotated[str, typer.Option(help="Names, with commas between; all if empty.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Tasks.")] = 36,
    real: Annotated[int, typer.Option(min=0, help="Of bundled: so many of them; the rest is micro.")] = 7,
    naive: Annotated[int, typer.Option(min=0, help="Tasks on which the naive grader is tried.")] = 4,
    out: Annotated[Path, typer.Option(help="Where the evidence is kept; a second run takes it up.")] = Path(
        "runs/audit"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the attacks and what each exploits.")] = False,
) -> None:
    """Attack the grading of a task set with every scripted cheat; exit code 1 if one of them got a reward."""
    from deepswe.audit.run import ATTACKS, holds, run_audit

    if names:
        for attack in ATTACKS.values():
            print(f"{attack.name:24} {attack.exploits}")
        return

    from deepswe.cli.progress import TerminalProgress
    from deepswe.session.interrupt import run_to_end

    wanted = [name.strip() for name in attacks.split(",") if name.strip()]
    with TerminalProgress() as progress:
        work = run_audit(
            tasks,
            backend=backend,
            attacks=wanted,
            limit=limit,
            real_tasks=real,
            naive_tasks=naive,
            directory=out,
            progress=progress,
        )
        figures = run_to_end(work)
    print(json.dumps(figures) if as_json else _table(figures))
    if not holds(figures):
        raise typer.Exit(1)


def _table(figures: dict[str, Any]) -> str:
    lines = [f"{name:24} {rate:.0%}" for name, rate in figures["by_attack"].items() if rate is not None]
    lines += ["", *(f"{name:24} {rate:.0%}" for name, rate in figures["by_task"].items() if rate is not None), ""]
    left_out = ("by_attack", "by_task", "naive_rewarded", "odd")
    lines += [f"{name:24} {value}" for name, value in figures.items() if name not in left_out]
    return "\n".join([*lines, *(f"! {name}: {reason}" for name, reason in figures["odd"].items())])
