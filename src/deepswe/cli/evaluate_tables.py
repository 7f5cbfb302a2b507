"""The tables of an evaluation on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from deepswe.analysis.harmless import harmless

Row = Mapping[str, Any]
MOST = 20
"""Rows of a group that are shown."""


def share(value: float | None) -> str:
    """As a percentage."""
    return "–" if value is None else f"{value:.1%}"


def span(row: Row) -> str:
    """An interval."""
    return "–" if row["low"] is None else f"{row['low']:.1%} to {row['high']:.1%}"


def plain(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(
        title=Text(harmless(title)),
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for number, name in enumerate(columns):
        table.add_column(Text(harmless(name)), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(harmless(cell)) for cell in row))
    return table


def evaluation_tables(name: str, row: Row) -> Group:
    """All that one evaluation says."""
    parts: list[Any] = []
    attempts = row["attempts"]
    missing = attempts["made"] - attempts["graded"]
    said = f"{name}: {attempts['graded']} of {attempts['planned']} attempts have a verdict"
    said += f", {missing} ended by the infrastructure (never scored)" if missing else ""
    parts.append(Text(harmless(said)))
    if "pass_at_1" in row:
        score = row["pass_at_1"]
        error = score["standard_error"]
        cells = [
            ("pass@1", share(score["mean"])),
            ("  95% interval, by task", span(score)),
            (f"  mean of {score['runs']} runs", share(score["mean_of_runs"])),
            ("  standard error over runs", "– (one run)" if error is None else share(error)),
            *((f"pass@{k}, unbiased", share(value)) for k, value in row["pass_at_k"].items() if k != "1"),
        ]
        parts.append(plain(f"{score['tasks']} tasks, {score['attempts']} verdicts", ("", ""), cells))
        for tag, rows in row["by"].items():
            columns = (tag, "tasks", "attempts", "pass@1", "95% interval")
            largest = sorted(rows, key=lambda r: -r["tasks"])[:MOST]
            lines = [(r["name"], str(r["tasks"]), str(r["attempts"]), share(r["mean"]), span(r)) for r in largest]
            hidden = f" (the largest {MOST} of {len(rows)}; all with --json)" if len(rows) > MOST else ""
            parts.append(plain(f"By {tag}{hidden}", columns, lines))
    parts.append(plain("Used", ("", "in all", "an attempt"), _used(row["used"])))
    endings = [(ending.replace("_", " "), str(count)) for ending, count in row["endings"].items() if count]
    parts.append(plain("Endings", ("", "attempts"), endings))
    return Group(*(part for item in parts for part in (item, Text(""))))


def _used(used: Row) -> list[tuple[str, str, str]]:
    mean = used["mean"]
    rows = [
        ("steps", f"{used['steps']:,}", f"{mean['steps']:.1f}"),
        ("tokens sampled", f"{used['sampled']:,}", f"{mean['sampled']:,.0f}"),
        ("tokens at the end", f"{used['context']:,}", f"{mean['context']:,.0f}"),
    ]
    if used["read"]:
        rows.append(("tokens read by the endpoint", f"{used['read']:,}", ""))
        rows.append(("  of these out of its cache", f"{used['cached']:,}", ""))
        rows.append(("dollars", f"{used['dollars']:.4f}", f"{mean['dollars']:.4f}"))
    if used["estimated"]:
        rows.append(("turns whose tokens are our estimate", f"{used['estimated']:,}", ""))
    return rows


def show(*renderables: Any) -> None:
    """Print on stdout, as wide as it needs where that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for renderable in renderables:
        shown = Text(harmless(renderable)) if isinstance(renderable, str) else renderable
        console.print(shown, highlight=False)
