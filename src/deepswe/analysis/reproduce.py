"""What an experiment showed: curves over seeds with 95% bands, effects with intervals, one offline HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean, stdev
from typing import Any, Literal

import jinja2

from deepswe.analysis.charts import draw_panel
from deepswe.analysis.panels import Panel, Series
from deepswe.evaluation.metrics import student_quantile

Row = Mapping[str, Any]
Measure = Literal["steps_to_reward", "final_reward"]
Expect = Literal["lower", "higher"]

SMOOTH = 5
"""Training steps in the moving mean of the reward."""
CURVES = {
    "reward_mean": ("Training reward", "Mean reward of the batch."),
    "steps_mean": ("Turns", "Mean environment steps of an attempt."),
    "sampled_mean": ("Response length", "Mean sampled tokens of an attempt."),
    "entropy": ("Entropy", "Nats a token."),
    "clip_high": ("Clipped above", "Share of the trained tokens that the upper bound stopped."),
    "solved_none": ("Groups without a solved attempt", "How many of the batch."),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One variant of an experiment: for each seed, the rows of its training steps in order."""

    name: str
    label: str
    runs: tuple[tuple[Row, ...], ...]


@dataclass(frozen=True, slots=True)
class Effect:
    """One arm against another, paired by seed.

    Attributes:
        ratio: geometric mean over seeds of this arm's measure over the other's.
        low, high: its 95% interval (Student's, of the logarithms); 0 and infinity for a single seed.
        censored: runs that never reached the threshold; they count with all their environment steps, so the ratio is
            then a bound.
        holds: the whole interval is on the expected side of 1.
    """

    arm: str
    against: str
    expect: Expect
    ratio: float
    low: float
    high: float
    censored: int
    holds: bool


def moving_mean(values: Sequence[float], width: int = SMOOTH) -> list[float]:
    """The mean of each value and up to `width` - 1 before it."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def steps_to_reward(rows: Sequence[Row], threshold: float) -> tuple[float, bool]:
    """Environment steps until the moving mean of the reward is at the threshold, and whether it ever was.

    One that never was counts with all its steps. The mean is over 5 training steps and begins with the fifth.
    """
    spent = 0.0
    smooth = moving_mean([float(row["reward_mean"]) for row in rows])
    for number, (row, reward) in enumerate(zip(rows, smooth, strict=True), start=1):
        spent += float(row["turns"])
        if number >= SMOOTH and reward >= threshold:
            return spent, True
    return spent, False


def final_reward(rows: Sequence[Row]) -> float:
    """Mean reward over the last quarter of the training steps, at least one of them; never below 0.001."""
    last = rows[-max(1, len(rows) // 4) :]
    return max(1e-3, fmean(float(row["reward_mean"]) for row in last))


def measured(arm: Arm, measure: Measure, threshold: float) -> tuple[list[float], int]:
    """The measure of each seed, and how many never reached the threshold."""
    if measure == "final_reward":
        return [final_reward(rows) for rows in arm.runs], 0
    reached = [steps_to_reward(rows, threshold) for rows in arm.runs]
    return [spent for spent, _ in reached], sum(not whether for _, whether in reached)


def compare(arm: Arm, against: Arm, *, measure: Measure, threshold: float, expect: Expect) -> Effect:
    """The effect of one arm against another. Both have the same seeds in the same order."""
    ours, missed = measured(arm, measure, threshold)
    theirs, missed_too = measured(against, measure, threshold)
    logs = [math.log(one / other) for one, other in zip(ours, theirs, strict=True)]
    mean = fmean(logs)
    if len(logs) > 1:
        reach = student_quantile(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(mean - reach), math.exp(mean + reach)
    else:
        low, high = 0.0, math.inf
    holds = high < 1.0 if expect == "lower" else low > 1.0
    return Effect(arm.name, against.name, expect, math.exp(mean), low, high, missed + missed_too, holds)


def band(runs: Sequence[Sequence[Row]], key: str) -> Series:
    """The mean over seeds at each step, smoothed within each run, with its 95% interval; x is the training step."""
    smooth = [moving_mean([float(row.get(key, 0.0)) for row in rows]) for rows in runs]
    points, bounds = [], []
    for step in range(min(map(len, smooth))):
        values = [run[step] for run in smooth]
        mean = fmean(values)
        points.append((float(step + 1), mean))
        if len(values) > 1:
            reach = student_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
            bounds.append((float(step + 1), mean - reach, mean + reach))
    return Series("", tuple(points), tuple(bounds))


def experiment_panels(arms: Sequence[Arm]) -> tuple[Panel, ...]:
    """One panel a quantity, one curve an arm; quantities that no run has are left out."""
    panels = []
    for key, (title, note) in CURVES.items():
        if any(key in row for arm in arms for rows in arm.runs for row in rows):
            curves = []
            for arm in arms:
                drawn = band(arm.runs, key)
                curves.append(Series(arm.label, drawn.points, drawn.band, smoothed=True))
            scale: Literal["share", "positive"] = "share" if key == "reward_mean" else "positive"
            panels.append(
                Panel(
                    title, f"{note} Mean over seeds, moving mean over {SMOOTH} steps, 95% band.", tuple(curves), scale
                )
            )
    return tuple(panels)


def render_page(
    question: str,
    arms: Sequence[Arm],
    effects: Sequence[Effect],
    *,
    measure: Measure,
    threshold: float,
    seeds: Sequence[int],
) -> str:
    """The page as HTML: no script, no other file, no network."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = resources.files("deepswe.analysis").joinpath("experiment.html.j2").read_text(encoding="utf-8")
    labels = {arm.name: arm.label for arm in arms}
    lines = []
    for arm in arms:
        values, missed = measured(arm, measure, threshold)
        lines.append((arm.label, fmean(values), min(values), max(values), missed))
    return environment.from_string(template).render(
        question=question,
        seeds=len(seeds),
        steps=min(len(rows) for arm in arms for rows in arm.runs),
        measure=_WORDS[measure].format(threshold=threshold),
        lines=lines,
        effects=[(labels[effect.arm], labels[effect.against], effect) for effect in effects],
        panels=[(panel, draw_panel(panel)) for panel in experiment_panels(arms)],
    )


_WORDS = {
    "steps_to_reward": "environment steps until the training reward is {threshold}",
    "final_reward": "mean training reward over the last quarter of the run",
}
