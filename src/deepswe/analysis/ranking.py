"""The pictures of a leaderboard: score against the size of the model (DeepSWE's figure 1), and bars (its figure 11)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from deepswe.analysis.figures import COLOURS, INK, QUIET, plain_axes, write_figure
from deepswe.analysis.harmless import harmless
from deepswe.errors import RunError
from deepswe.evaluation.leaderboard import Entry


def draw_ranking(entries: Sequence[Entry]) -> Figure:
    """Bars with 95% intervals over tasks; and beside them, where sizes are known, scores against sizes.

    Raises:
        RunError: there is no entry.
    """
    if not entries:
        raise RunError("there are no results to draw; name at least one run or file")
    sized = [entry for entry in entries if entry.size]
    figure = Figure(figsize=(6.4 * (2 if sized else 1), 1.6 + 0.45 * max(len(entries), 4)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if sized else 1, squeeze=False)[0]
    _bars(axes[0], entries)
    if sized:
        _against_size(axes[1], sized)
    return figure


def _literal(name: str) -> str:
    """A name in which matplotlib finds no formula."""
    return harmless(name).replace("$", r"\$")


def _bars(axes: Axes, entries: Sequence[Entry]) -> None:
    rows = list(reversed(entries))
    for at, entry in enumerate(rows):
        colour = COLOURS[at % len(COLOURS)]
        axes.barh(at, entry.mean, height=0.6, color=colour, alpha=0.85)
        axes.plot([entry.low, entry.high], [at, at], color=INK, linewidth=1.2)
        axes.text(entry.high + 0.01, at, f"{entry.mean:.1%}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [_literal(entry.name) for entry in rows], fontsize=8)
    axes.set_xlim(0.0, 1.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    plain_axes(axes, "pass@1 with 95% intervals over tasks", "x")


def _against_size(axes: Axes, entries: Sequence[Entry]) -> None:
    for at, entry in enumerate(entries):
        colour = COLOURS[at % len(COLOURS)]
        size = entry.size or 0.0
        axes.errorbar(
            [size], [entry.mean], yerr=[[entry.mean - entry.low], [entry.high - entry.mean]], fmt="o", color=colour
        )
        axes.annotate(
            _literal(entry.name), (size, entry.mean), xytext=(6, 4), textcoords="offset points", fontsize=8, color=INK
        )
    axes.set_xscale("log")
    axes.set_xlabel("parameters of the model, billions", fontsize=9, color=QUIET)
    axes.set_ylim(0.0, 1.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    plain_axes(axes, "pass@1 against size", "y")


def write_ranking(entries: Sequence[Entry], path: Path) -> Path:
    """Write the picture as PNG, atomically.

    Raises:
        RunError: it cannot be written.
    """
    return write_figure(draw_ranking(entries), path)
