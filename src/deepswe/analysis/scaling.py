"""The picture of test-time scaling: Best@K of each method under Pass@K (DeepSWE's figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from deepswe.analysis.figures import COLOURS, QUIET, plain_axes, write_figure
from deepswe.errors import RunError
from deepswe.evaluation.metrics import Estimate
from deepswe.evaluation.selection import CurvePoint


def draw_scaling(points: Sequence[CurvePoint], *, title: str) -> Figure:
    """One axes: K against the share of tasks solved, with 95% bands over tasks.

    Raises:
        RunError: there is no point.
    """
    if not points:
        raise RunError("no task has candidates with outcomes, so there is no curve to draw")
    figure = Figure(figsize=(7.0, 4.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines: list[tuple[str, list[Estimate], str, str]] = [
        ("Pass@K, the ceiling", [point.pass_at_k for point in points], "#9aa5b1", "--")
    ]
    for colour, method in zip(COLOURS, points[0].best, strict=False):
        lines.append((f"Best@K, {method}", [point.best[method] for point in points], colour, "-"))
    ks = [point.k for point in points]
    for label, estimates, colour, style in lines:
        axes.fill_between(
            ks, [e.low for e in estimates], [e.high for e in estimates], color=colour, alpha=0.08, linewidth=0
        )
        axes.plot(ks, [e.mean for e in estimates], style, color=colour, marker="o", markersize=4, label=label)
    axes.set_xlabel("candidates K", fontsize=9, color=QUIET)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain_axes(axes, title, "y")
    axes.legend(fontsize=8, frameon=False, loc="best")
    return figure


def write_scaling(points: Sequence[CurvePoint], path: Path, *, title: str) -> Path:
    """Write the picture as PNG, atomically.

    Raises:
        RunError: it cannot be written.
    """
    return write_figure(draw_scaling(points, title=title), path)


def curve_rows(points: Sequence[CurvePoint]) -> list[dict[str, Any]]:
    """The numbers of the curve as plain values."""
    return [asdict(point) for point in points]
