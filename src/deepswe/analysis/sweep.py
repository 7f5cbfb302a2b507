"""The picture of a sweep: pass@1 against the limit of steps or tokens (DeepSWE's figure 9)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from deepswe.analysis.figures import COLOURS, plain_axes, write_figure
from deepswe.errors import RunError
from deepswe.evaluation.sweep import SweepPoint


def draw_sweep(points: Sequence[SweepPoint]) -> Figure:
    """One axes a limit, with 95% bands over tasks.

    Raises:
        RunError: there is no point.
    """
    knobs = list(dict.fromkeys(point.knob for point in points))
    if not knobs:
        raise RunError("there is no point to draw; give --steps or --tokens")
    figure = Figure(figsize=(5.4 * len(knobs), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, knob in zip(figure.subplots(1, len(knobs), squeeze=False)[0], knobs, strict=True):
        chosen = sorted((point for point in points if point.knob == knob), key=lambda point: point.value)
        values, scores = [point.value for point in chosen], [point.estimate for point in chosen]
        axes.fill_between(values, [e.low for e in scores], [e.high for e in scores], color=COLOURS[0], alpha=0.12)
        axes.plot(values, [e.mean for e in scores], "-o", color=COLOURS[0], markersize=5)
        axes.set_ylim(0.0, 1.0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        plain_axes(axes, f"pass@1 by limit of {knob}", "y")
    return figure


def write_sweep(points: Sequence[SweepPoint], path: Path) -> Path:
    """Write the picture as PNG, atomically.

    Raises:
        RunError: it cannot be written.
    """
    return write_figure(draw_sweep(points), path)
