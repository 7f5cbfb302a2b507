"""What the curves of a run show, as data: one list of panels that the PNG and the HTML report both draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from deepswe.analysis.record import Row, RunRecord, number
from deepswe.training.health import ENTROPY_BAND, findings
from deepswe.types import Ending

Scale = Literal["share", "free", "positive"]

GROUPS = {"solved_some": "some solved", "solved_all": "all solved", "solved_none": "none solved"}
ENDINGS = {f"ending/{ending.value}": ending.value.replace("_", " ") for ending in Ending}


@dataclass(frozen=True, slots=True)
class Series:
    """One curve.

    Attributes:
        label: for the legend.
        points: (step, value), steps rising.
        band: (step, low, high) of an interval, or empty.
        marks: draw a mark on each point and join them as they are; otherwise the points are noisy measurements, drawn
            pale under their moving mean.
        smoothed: the points are means already; they are joined as they are, without marks.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float, float], ...] = ()
    marks: bool = False
    smoothed: bool = False

    @property
    def smooth(self) -> tuple[tuple[float, float], ...]:
        """The centred moving mean over about a tenth of the points; the points themselves where there are few."""
        reach = len(self.points) // 20
        if self.marks or self.smoothed or reach == 0:
            return self.points
        means = []
        for index, (step, _) in enumerate(self.points):
            around = min(reach, index, len(self.points) - 1 - index)
            window = self.points[index - around : index + around + 1]
            means.append((step, sum(value for _, value in window) / len(window)))
        return tuple(means)


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        title: what is shown.
        note: one line that says what it means.
        series: the curves; for a stacked panel, shares that add up to 1 at each step.
        scale: "share" runs from 0 to 1, "positive" starts at 0, "free" fits the values.
        stacked: draw the series on top of each other.
        unit: of the horizontal axis.
        healthy: a band of values that is drawn behind the curves, or None.
    """

    title: str
    note: str
    series: tuple[Series, ...]
    scale: Scale = "free"
    stacked: bool = False
    unit: str = "step"
    healthy: tuple[float, float] | None = None

    @property
    def empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(series.points for series in self.series)


def run_panels(run: RunRecord) -> tuple[Panel, ...]:
    """The panels that have something to show, the most important first. Keys that a run lacks leave no trace.

    A step in which nothing trained ("updates" is 0) measured nothing of the learner, so it has no point there.
    """
    train = run.of_kind("train")
    learned = tuple(row for row in train if number(row, "updates") != 0)
    panels = (
        Panel(
            "Held-out pass@1",
            "Share of held-out attempts with the full reward, with its 95% interval.",
            evaluation_series(run),
            "share",
        ),
        Panel(
            "Training reward",
            "Mean reward of the batch, before the update that it gives.",
            _curves(train, {"reward_mean": "mean reward"}),
            "share",
        ),
        Panel(
            "Groups that teach",
            "Share of groups with some, all or no attempt solved. Equal rewards give no gradient.",
            share_series(train, GROUPS),
            "share",
            stacked=True,
        ),
        Panel(
            "How attempts ended",
            "Share of each ending in the batch.",
            share_series(train, ENDINGS),
            "share",
            stacked=True,
        ),
        Panel(
            "Turns",
            "Mean turns of an attempt.",
            _curves(train, {"steps_mean": "turns"}),
            "positive",
        ),
        Panel(
            "Length",
            "Mean tokens of an attempt, and of these the sampled ones.",
            _curves(train, {"length_mean": "all tokens", "sampled_mean": "sampled tokens"}),
            "positive",
        ),
        Panel(
            "Entropy",
            "Mean entropy of the next-token distribution on sampled tokens, in nats. The band is 0.3 to 1, where the "
            "DeepSWE write-up needed no entropy bonus.",
            _curves(learned, {"entropy": "entropy"}),
            "positive",
            healthy=ENTROPY_BAND,
        ),
        Panel(
            "Gradient norm",
            "Before clipping.",
            _curves(learned, {"grad_norm": "gradient norm"}),
            "positive",
        ),
        Panel(
            "Clipped tokens",
            "Share of trained tokens at which the lower or the upper bound stopped the gradient.",
            _curves(learned, {"clip_low": "lower bound", "clip_high": "upper bound"}),
            "positive",
        ),
        Panel(
            "KL to the sampler",
            "Estimate of the divergence between the sampling and the training distribution, in nats a token.",
            _curves(learned, {"kl_sampler": "KL"}),
        ),
        Panel(
            "KL to the start",
            "Estimate of the divergence from the weights at the start of RL, in nats a token.",
            _curves(learned, {"kl_start": "KL"}),
            "positive",
        ),
        Panel(
            "Ratio",
            "Policy over sampler, or over itself before the batch: mean and largest over the trained tokens.",
            _curves(learned, {"ratio": "mean", "ratio_max": "largest"}),
            "positive",
        ),
        Panel(
            "Advantages",
            "Over the trained tokens.",
            _curves(learned, {"advantage_max": "largest", "advantage_std": "deviation", "advantage_min": "least"}),
        ),
        Panel(
            "Age",
            "Updates between the sampling of the oldest token and its training.",
            _curves(learned, {"age_mean": "mean", "age_max": "largest"}),
            "positive",
        ),
        Panel(
            "Tokens a turn",
            "Mean sampled tokens of a turn.",
            _curves(train, {"turn_tokens_mean": "tokens"}),
            "positive",
        ),
        Panel(
            "Value function",
            "Share of the variance of the returns that the values explain.",
            _curves(learned, {"value_explained": "explained"}),
        ),
        Panel(
            "Seconds a step",
            "Wall time of rollouts with grading, and of the learner.",
            _curves(train, {"rollout_s": "rollouts", "learner_s": "learner"}),
            "positive",
        ),
    )
    return tuple(panel for panel in panels if not panel.empty)


def run_warnings(run: RunRecord) -> tuple[str, ...]:
    """One line for each kind of trouble that the rows name: how often, and what it said last. None is good news."""
    train = run.of_kind("train")
    places: dict[str, list[int]] = {}
    for index, row in enumerate(train):
        names = row.get("warnings")
        for name in names if isinstance(names, list) else ():
            places.setdefault(str(name), []).append(index)
    lines = []
    for name, at in places.items():
        last = next((found.text for found in findings(train[: at[-1] + 1]) if found.name == name), name)
        lines.append(f"{len(at)} of {len(train)} steps, last at step {train[at[-1]]['step']}: {last}")
    return tuple(lines)


def imitation_panels(run: RunRecord) -> tuple[Panel, ...]:
    """The curve of the supervised warm-up, if there was one."""
    rows = run.of_kind("imitation")
    panel = Panel(
        "Imitation loss",
        "Mean negative log-likelihood of the reference solver's tokens, in nats.",
        _curves(rows, {"loss": "loss"}),
        "positive",
        unit="update",
    )
    return () if panel.empty else (panel,)


def evaluation_series(run: RunRecord) -> tuple[Series, ...]:
    """pass@1 over steps, one curve a split, in the order in which the splits first occur."""
    rows = run.of_kind("evaluation")
    splits = dict.fromkeys(str(row.get("split", "")) for row in rows)
    return tuple(
        _evaluation_curve(split, [row for row in rows if str(row.get("split", "")) == split]) for split in splits
    )


def share_series(rows: Sequence[Row], labels: Mapping[str, str]) -> tuple[Series, ...]:
    """Counts under several keys as shares of their sum, for those that ever occur. Rows without counts are left out."""
    counted = []
    for row in rows:
        counts = {key: number(row, key) or 0.0 for key in labels}
        if (whole := sum(counts.values())) > 0:
            counted.append((float(row["step"]), {key: count / whole for key, count in counts.items()}))
    return tuple(
        Series(label, tuple((step, shares[key]) for step, shares in counted))
        for key, label in labels.items()
        if any(shares[key] for _, shares in counted)
    )


def _evaluation_curve(split: str, rows: Sequence[Row]) -> Series:
    points, band = [], []
    for row in rows:
        value, low, high = (number(row, key) for key in ("pass_at_1", "low", "high"))
        if value is not None:
            points.append((float(row["step"]), value))
            if low is not None and high is not None:
                band.append((float(row["step"]), low, high))
    return Series(split or "pass@1", tuple(points), tuple(band), marks=True)


def _curves(rows: Iterable[Row], labels: dict[str, str]) -> tuple[Series, ...]:
    kept = tuple(rows)
    curves = (
        Series(label, tuple((float(row["step"]), value) for row in kept if (value := number(row, key)) is not None))
        for key, label in labels.items()
    )
    return tuple(curve for curve in curves if curve.points)
