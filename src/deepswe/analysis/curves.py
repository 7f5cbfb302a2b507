"""The curves of a run as one PNG."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from deepswe.analysis.figures import COLOURS, INK, PALE, QUIET, write_figure
from deepswe.analysis.panels import Panel, Series, imitation_panels, run_panels
from deepswe.analysis.record import RunRecord, read_run
from deepswe.errors import RunError

COLUMNS = 3
LABEL = -0.1
"""Where the unit stands below a panel, in heights of it."""


def write_curves(run_dir: Path) -> Path:
    """Draw `run_dir`/curves.png from its metrics.jsonl; the run may still be going on.

    Returns:
        The path of the picture.

    Raises:
        RunError: there is nothing to draw yet, a file is damaged, or the picture cannot be written.
    """
    run = read_run(run_dir)
    return write_figure(draw_curves(run), run_dir / "curves.png", dpi=110)


def draw_curves(run: RunRecord) -> Figure:
    """A figure with one axes per panel.

    Raises:
        RunError: the run has no row with anything to draw.
    """
    panels = (*run_panels(run), *imitation_panels(run))
    if not panels:
        raise RunError(f"{run.directory} has no metrics to draw yet; wait for the first step or evaluation")
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = 5.0 * columns, 3.0 * rows + 0.6
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(_plain(run.name), x=0.2 / width, ha="left", fontsize=15, fontweight="bold", color=INK)
    grid = figure.subplots(rows, columns, squeeze=False)
    # Fixed margins in inches: fitting them costs several times the drawing.
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.2 / width, bottom=0.5 / height, top=1 - 0.9 / height, wspace=0.18, hspace=0.38
    )
    cells = [grid[row][column] for row in range(rows) for column in range(columns)]
    for axes, panel in zip(cells, panels, strict=False):
        _draw(axes, panel)
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    # Places that are given need not be found from the sizes of all that is near, which is a tenth of the drawing.
    axes.set_title(panel.title, loc="left", y=1.0, fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(panel.unit, fontsize=8, color=QUIET)
    axes.xaxis.set_label_coords(0.5, LABEL)
    if panel.healthy is not None:
        axes.axhspan(*panel.healthy, color="#588157", alpha=0.12, linewidth=0)
    if panel.stacked:
        _draw_stack(axes, panel.series)
    else:
        for colour, series in zip(COLOURS, panel.series, strict=False):
            _draw_series(axes, series, colour)
    if panel.scale == "share":
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.scale == "positive":
        axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.02)
    axes.grid(axis="y", color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=QUIET, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    if len(panel.series) > 1:
        axes.legend(fontsize=8, frameon=panel.stacked, framealpha=0.8, loc="best")


def _draw_series(axes: Axes, series: Series, colour: str) -> None:
    label = _plain(series.label)
    if series.band:
        steps, lows, highs = zip(*series.band, strict=True)
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.vlines(steps, lows, highs, color=colour, alpha=0.6, linewidth=1.2)
    steps, values = zip(*series.points, strict=True)
    if series.marks or len(series.points) < 3:
        axes.plot(steps, values, color=colour, marker="o", markersize=5, linewidth=1.8, label=label)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
    steps, values = zip(*series.smooth, strict=True)
    axes.plot(steps, values, color=colour, linewidth=2.0, label=label)


def _draw_stack(axes: Axes, stack: tuple[Series, ...]) -> None:
    steps = [step for step, _ in stack[0].points]
    heights = [[value for _, value in series.points] for series in stack]
    labels = [_plain(series.label) for series in stack]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(stack))]
    if len(steps) == 1:
        steps, heights = [steps[0] - 0.4, steps[0] + 0.4], [values * 2 for values in heights]
    axes.stackplot(steps, *heights, labels=labels, colors=colours, alpha=0.85)


def _plain(text: str) -> str:
    """Text that matplotlib draws as it is: no mathematics, nothing that a font file cannot hold."""
    return "".join(c if c.isprintable() and ord(c) < 0x2000 else "?" for c in text).replace("$", r"\$")[:80]
