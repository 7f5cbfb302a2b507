"""`deepswe watch`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deepswe.analysis.live import State

SHOWN = {
    "reward_mean": "reward",
    "entropy": "entropy",
    "kl_sampler": "KL to the sampler",
    "grad_norm": "gradient norm",
    "length_mean": "tokens an attempt",
    "steps_mean": "turns an attempt",
    "rollout_s": "s of rollouts",
    "learner_s": "s of the learner",
}


def watch(
    run: Annotated[Path, typer.Argument(help="The directory of a run that another process writes.")],
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and end.")] = False,
) -> None:
    """Watch a run go on; ends with it, or with Ctrl-C. Changes nothing in it."""
    from rich.console import Console
    from rich.live import Live

    from deepswe.analysis.live import Watcher

    watcher, console = Watcher(run), Console()
    state = watcher.look()
    if once:
        console.print(_draw(state, console.width))
        return
    try:
        with Live(_draw(state, console.width), console=console, auto_refresh=False) as live:
            while state.status == "running":
                time.sleep(every)
                state = watcher.look()
                live.update(_draw(state, console.width), refresh=True)
    except KeyboardInterrupt:
        console.print("not watched any more; the run goes on", style="dim")
        return
    if state.status == "stopped":
        console.print("no process owns this run; continue it with --resume")


def _draw(state: State, width: int) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from deepswe.analysis.harmless import harmless
    from deepswe.analysis.live import sparkline

    lines: list[RenderableType] = []
    if state.steps:
        lines.append(_bar("training", state.step, state.steps))
    elif state.imitation:
        lines.append(Text(f"imitation: {state.imitation} updates"))
    if state.batch:
        lines.append(
            _bar(state.batch, state.done, state.wanted) if state.wanted else Text(f"{state.batch}: {state.done} done")
        )
    if state.rewards:
        lines.append(Text(f"reward  {sparkline(state.rewards, max(10, width - 24))}  {state.rewards[-1]:.2f}"))
    numbers = Table.grid(padding=(0, 3))
    shown = [(label, state.train[key]) for key, label in SHOWN.items() if isinstance(state.train.get(key), int | float)]
    for first in range(0, len(shown), 2):
        pair = shown[first : first + 2]
        numbers.add_row(*(text for label, value in pair for text in (Text(label, style="dim"), Text(f"{value:.3g}"))))
    lines.append(numbers)
    for row in state.evaluations:
        score = f"{row['pass_at_1']:.1%} [{row['low']:.1%}, {row['high']:.1%}]" if "low" in row else ""
        lines.append(
            Text(harmless(f"pass@1 {row.get('split', '')} {row.get('name', '')}, step {row['step']}: {score}"))
        )
    if state.warnings:
        lines.append(Text("unhealthy: " + ", ".join(map(harmless, state.warnings)), style="yellow"))
    return Panel(Group(*lines), title=Text(f"{harmless(state.name)}: {state.status}"), title_align="left")


def _bar(label: str, done: int, wanted: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2))
    row.add_row(Text(label), ProgressBar(total=wanted, completed=done, width=30), Text(f"{done}/{wanted}"))
    return row
