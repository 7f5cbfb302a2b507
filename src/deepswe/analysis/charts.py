"""Panels as inline SVG: no script, no external asset; colours come from the page's CSS (classes c0 ... c5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from deepswe.analysis.harmless import harmless
from deepswe.analysis.panels import Panel, Series

WIDTH, HEIGHT = 360.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 8.0, 24.0
COLOURS = 6
ROW_HEIGHT, ROWS_TOP, LABEL_WIDTH, ROWS_WIDTH, APART = 76.0, 6.0, 104.0, 720.0, 8.0


@dataclass(frozen=True, slots=True)
class _Axes:
    """Data to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def draw_panel(panel: Panel) -> Markup:
    """One panel as an <svg> element with a description for those who cannot see it."""
    axes = _axes(panel)
    parts = [_grid(panel, axes), _healthy(panel, axes)]
    if panel.stacked:
        parts.append(_stack(panel.series, axes))
    else:
        parts += [_curve(series, axes, index % COLOURS) for index, series in enumerate(panel.series)]
    return Markup('<svg class="chart" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, harmless(describe(panel)), Markup("").join(parts)
    )


def draw_before_after(rows: Sequence[tuple[str, tuple[float, float, float], tuple[float, float, float]]]) -> Markup:
    """One line a split: from pass@1 before to pass@1 after, both with their intervals.

    Args:
        rows: (label, (mean, low, high) before, (mean, low, high) after), shares in [0, 1].
    """
    height = ROWS_TOP + ROW_HEIGHT * len(rows) + 24
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            Markup(
                '<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{end:.1f}"/>'
                '<text class="tick" x="{x:.1f}" y="{under:.1f}" text-anchor="middle">{label}</text>'
            ).format(x=_across(tick), top=ROWS_TOP, end=height - 22, under=height - 6, label=f"{tick:.0%}")
        )
    for index, (label, before, after) in enumerate(rows):
        parts.append(_before_after_row(label, before, after, ROWS_TOP + ROW_HEIGHT * index))
    spoken = "; ".join(f"{harmless(label)}: from {before[0]:.1%} to {after[0]:.1%}" for label, before, after in rows)
    return Markup('<svg class="lift" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="pass@1, {}">{}</svg>').format(
        ROWS_WIDTH, height, spoken, Markup("").join(parts)
    )


def describe(panel: Panel) -> str:
    """The panel in words: first and last value of each curve."""
    said = [
        f"{series.label} from {format_value(series.points[0][1], panel)} at {panel.unit} {series.points[0][0]:.0f} "
        f"to {format_value(series.points[-1][1], panel)} at {panel.unit} {series.points[-1][0]:.0f}"
        for series in panel.series
        if series.points
    ]
    return f"{panel.title}: " + "; ".join(said)


def format_value(value: float, panel: Panel) -> str:
    """A value as its panel's axis writes it."""
    return f"{value:.0%}" if panel.scale == "share" else f"{value:.3g}"


def nice_ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """About `count` round values that cover [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return (low,)
    size = 10.0 ** math.floor(math.log10(span / count))
    size *= next(factor for factor in (1, 2, 5, 10) if span / (size * factor) <= count)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return tuple(index * size for index in range(first, last + 1))


def _axes(panel: Panel) -> _Axes:
    steps = [step for series in panel.series for step, _ in series.points]
    values = [value for series in panel.series for _, value in series.points]
    x_low, x_high = min(steps), max(steps)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    if panel.scale == "share":
        return _Axes(x_low, x_high, 0.0, 1.0)
    low, high = min(values), max(values)
    if panel.scale == "positive":
        low = min(0.0, low)
    if high - low < 1e-12:
        high = low + (abs(low) or 1.0)
    ticks = nice_ticks(low, high)
    return _Axes(x_low, x_high, ticks[0], ticks[-1])


def _grid(panel: Panel, axes: _Axes) -> Markup:
    parts = []
    for tick in nice_ticks(axes.y_low, axes.y_high):
        parts.append(
            Markup(
                '<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
                '<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="end">{}</text>'
            ).format(LEFT, WIDTH - RIGHT, LEFT - 6, axes.y(tick) + 3.5, _short(tick, panel), y=axes.y(tick))
        )
    for tick in nice_ticks(axes.x_low, axes.x_high):
        if axes.x_low <= tick <= axes.x_high and tick == int(tick):
            parts.append(
                Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="middle">{:.0f}</text>').format(
                    axes.x(tick), HEIGHT - 8, tick
                )
            )
    return Markup("").join(parts)


def _healthy(panel: Panel, axes: _Axes) -> Markup:
    if panel.healthy is None:
        return Markup("")
    low, high = (axes.y(value) for value in panel.healthy)
    return Markup('<rect class="healthy" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
        LEFT, high, WIDTH - LEFT - RIGHT, max(low - high, 1.0)
    )


def _short(value: float, panel: Panel) -> str:
    if panel.scale == "share":
        return f"{value:.0%}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return "0" if abs(value) < 1e-15 else f"{value:.4g}"


def _curve(series: Series, axes: _Axes, colour: int) -> Markup:
    parts = []
    if series.band:
        upper = [(step, high) for step, _, high in series.band]
        lower = [(step, low) for step, low, _ in reversed(series.band)]
        parts.append(Markup('<polygon class="band" points="{}"/>').format(axes.path([*upper, *lower])))
        for step, low, high in series.band:
            parts.append(
                Markup('<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
                    axes.y(low), axes.y(high), x=axes.x(step)
                )
            )
    if series.smooth != series.points:
        parts.append(Markup('<polyline class="raw" points="{}"/>').format(axes.path(series.points)))
    parts.append(Markup('<polyline class="line" points="{}"/>').format(axes.path(series.smooth)))
    if series.marks or len(series.points) < 3:
        for step, value in series.points:
            parts.append(
                Markup('<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(axes.x(step), axes.y(value))
            )
    return Markup('<g class="c{}">{}</g>').format(colour, Markup("").join(parts))


def _stack(stack: Sequence[Series], axes: _Axes) -> Markup:
    steps = [step for step, _ in stack[0].points]
    edges = [(axes.x_low, 0), (axes.x_high, 0)] if len(steps) == 1 else [(step, at) for at, step in enumerate(steps)]
    below = [0.0] * len(edges)
    parts = []
    for index, series in enumerate(stack):
        above = [floor + series.points[at][1] for floor, (_, at) in zip(below, edges, strict=True)]
        outline = [(x, value) for (x, _), value in zip(edges, above, strict=True)]
        ground = [(x, value) for (x, _), value in zip(edges, below, strict=True)]
        parts.append(
            Markup('<polygon class="area c{}" points="{}"/>').format(
                index % COLOURS, axes.path([*outline, *reversed(ground)])
            )
        )
        below = above
    return Markup("").join(parts)


def _across(share: float) -> float:
    return LABEL_WIDTH + share * (ROWS_WIDTH - LABEL_WIDTH - 24)


def _before_after_row(
    label: str, before: tuple[float, float, float], after: tuple[float, float, float], top: float
) -> Markup:
    middle = top + ROW_HEIGHT / 2
    upper, lower = middle - APART, middle + APART
    parts = [
        Markup('<text class="rowlabel" x="0" y="{:.1f}">{}</text>').format(middle + 5, harmless(label)),
        Markup('<line class="move" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(
            _across(before[0]), upper, _across(after[0]), lower
        ),
    ]
    for name, (mean, low, high), y, text_y in (
        ("before", before, upper, upper - 13),
        ("after", after, lower, lower + 21),
    ):
        parts.append(
            Markup(
                '<g class="{name}"><line class="interval" x1="{:.1f}" x2="{:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
                '<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>'
                '<text class="value" x="{x:.1f}" y="{:.1f}" text-anchor="middle">{value}</text></g>'
            ).format(_across(low), _across(high), text_y, name=name, x=_across(mean), y=y, value=f"{mean:.1%}")
        )
    return Markup("").join(parts)
