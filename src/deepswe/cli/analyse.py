"""`deepswe analyse`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def analyse(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or going on.")],
    phase: Annotated[str | None, typer.Option("--phase", help="Only this phase, such as after_heldout.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Show each turn of the attempts at this task, with the evidence.")
    ] = None,
    gold: Annotated[
        str,
        typer.Option(
            "--gold", help="Where gold patches come from: auto, recipe (makes tasks anew), none, or a task set's path."
        ),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as one JSON object.")] = False,
) -> None:
    """What the agent does: classes of turns, habits, solved against unsolved, drift over training."""
    if task is not None:
        _show_turns(run, task, phase, as_json)
        return

    from deepswe.analysis.behaviour_run import analyse_run

    found = analyse_run(run, phase=phase, gold=gold)
    if as_json:
        print(json.dumps(found))
    else:
        _show_run(found)


def _show_turns(run: Path, task: str, phase: str | None, as_json: bool) -> None:
    from deepswe.analysis.behaviour import classify
    from deepswe.analysis.behaviour_run import find_attempts
    from deepswe.analysis.harmless import harmless

    rows: list[dict[str, Any]] = []
    for trajectory in find_attempts(run, task, phase=phase):
        turns: list[dict[str, Any]] = [
            {"turn": number, "class": seen.action.value, "rule": seen.rule, "evidence": seen.evidence}
            for number, seen in enumerate(classify(trajectory.steps), start=1)
        ]
        name = {"phase": trajectory.phase, "step": trajectory.step, "attempt": trajectory.attempt}
        rows.append({**name, "reward": trajectory.reward, "turns": turns})
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{harmless(row['phase'])} step {row['step']} attempt {row['attempt']}: reward {row['reward']}")
        for turn in row["turns"]:
            evidence = " ".join(harmless(turn["evidence"]).split())
            print(f"  {turn['turn']:3d}  {turn['class']:16s}{turn['rule']}{': ' if evidence else ''}{evidence}")


def _show_run(found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    columns = {"all": found["all"], "solved": found["solved"], "unsolved": found["unsolved"]}
    table = Table("", *columns, title="Turns by class", title_justify="left")
    for action in found["all"]["share"]:
        table.add_row(action.replace("_", " "), *(f"{column['share'][action]:.1%}" for column in columns.values()))
    table.add_row("attempts", *(f"{column['attempts']:,}" for column in columns.values()))
    table.add_row("turns an attempt", *(f"{column['turns']:.1f}" for column in columns.values()))
    table.add_row("first edit at turn", *(_number(column["first_edit"]) for column in columns.values()))
    table.add_row("first reproduction at", *(_number(column["first_reproduction"]) for column in columns.values()))
    console.print(table)
    habits = Table("", "share", "solved - unsolved, same task", title="Attempts that ...", title_justify="left")
    for name, share in found["all"]["habits"].items():
        if share is not None:
            difference = found["differences"].get(name)
            shown = f"{share['mean']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"
            habits.add_row(name.replace("_", " "), shown, _difference(difference))
    console.print(habits)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _difference(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    low, high = 100 * value["low"], 100 * value["high"]
    return f"{100 * value['mean']:+.1f} points [{low:+.1f}, {high:+.1f}], {value['tasks']} tasks"
