"""The curves draw whatever is there, and nothing that is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from run_records import write_metrics

from deepswe.analysis.charts import describe, draw_panel, nice_ticks
from deepswe.analysis.curves import draw_curves, write_curves
from deepswe.analysis.harmless import clip, harmless
from deepswe.analysis.panels import Panel, Series, run_panels
from deepswe.analysis.record import read_run, total
from deepswe.errors import RunError


def test_png_has_one_axes_per_panel_and_is_a_png(learned_run: Path) -> None:
    path = write_curves(learned_run)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [item.name for item in learned_run.glob("curves*")] == ["curves.png"]
    figure = draw_curves(read_run(learned_run))
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert titles == [panel.title for panel in run_panels(read_run(learned_run))] + ["Imitation loss"]


def test_missing_null_and_infinite_values_leave_gaps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 1, "grad_norm": null, "entropy": NaN}\n'
        '{"kind": "train", "step": 2, "grad_norm": 0.5, "entropy": Infinity, "steps_mean": "many", "clip_low": true}\n',
        encoding="utf-8",
    )
    (panel,) = run_panels(read_run(tmp_path))
    assert panel.title == "Gradient norm"
    assert panel.series[0].points == ((2.0, 0.5),)
    write_curves(tmp_path)


def test_a_step_without_an_update_has_no_point_of_the_learner(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        [
            {"kind": "train", "step": 1, "reward_mean": 0.0, "updates": 0, "entropy": 0.0},
            {"kind": "train", "step": 2, "reward_mean": 0.5, "updates": 1, "entropy": 0.7},
        ],
    )
    points = {panel.title: panel.series[0].points for panel in run_panels(read_run(tmp_path))}
    assert points == {"Training reward": ((1.0, 0.0), (2.0, 0.5)), "Entropy": ((2.0, 0.7),)}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_has_just_begun_can_be_drawn(tmp_path: Path, steps: int) -> None:
    rows = [
        {"kind": "train", "step": step, "reward_mean": 0.0, "entropy": 0.0, "ending/submitted": 3, "solved_none": 2}
        for step in range(1, steps + 1)
    ]
    write_metrics(tmp_path, [{"kind": "evaluation", "step": 0, "split": "$x^$", "pass_at_1": 0.0}, *rows])
    write_curves(tmp_path)
    assert all("nan" not in draw_panel(panel) for panel in run_panels(read_run(tmp_path)))


def test_nothing_to_draw_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no metrics to draw yet"):
        write_curves(tmp_path)


def test_endings_become_shares_that_add_up_to_one(learned_run: Path) -> None:
    panel = next(panel for panel in run_panels(read_run(learned_run)) if panel.title == "How attempts ended")
    assert "generation timeout" not in [series.label for series in panel.series]
    for values in zip(*(series.points for series in panel.series), strict=True):
        assert math.fsum(value for _, value in values) == pytest.approx(1.0)


def test_moving_mean_keeps_a_straight_line_straight() -> None:
    line = tuple((float(step), 2.0 * step) for step in range(60))
    assert [value for _, value in Series("x", line).smooth] == pytest.approx([value for _, value in line])
    assert Series("x", line[:10]).smooth == line[:10]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, (0, 0.5, 1.0)), (0, 60, (0, 20, 40, 60)), (-0.03, 0.05, (-0.04, -0.02, 0, 0.02, 0.04, 0.06)), (3, 3, (3,))],
)
def test_ticks_are_round_and_cover_the_values(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert nice_ticks(low, high) == pytest.approx(expected)


def test_a_panel_describes_itself_in_words() -> None:
    panel = Panel("Reward", "", (Series("mean", ((1.0, 0.25), (9.0, 0.75))),), "share")
    assert describe(panel) == "Reward: mean from 25% at step 1 to 75% at step 9"


def test_labels_in_a_picture_are_escaped() -> None:
    svg = draw_panel(Panel('"><script>', "", (Series("<b>", ((0.0, 1.0),)),)))
    assert "<script>" not in svg
    assert "<b>" not in svg


def test_total_skips_rows_without_the_key() -> None:
    assert total([{"n": 2}, {}, {"n": None}, {"n": 3}], "n") == 5
    assert total([{}], "n") is None


def test_harmless_leaves_ordinary_text_alone() -> None:
    for text in ("plain\n\ttext", "naïve 日本語 🙂 שלום", "<b>&amp;"):
        assert harmless(text) == text


def test_clip_keeps_beginning_and_end_and_says_how_much_is_gone() -> None:
    text = clip("a" * 50 + "b" * 1_000_000 + "c" * 50, characters=400, line=400)
    assert text.startswith("a" * 50)
    assert text.endswith("c" * 50)
    assert "999,700 characters left out" in text
    assert clip("short\nlines") == "short\nlines"
    assert clip("a\n" + "b" * 100, line=40).startswith("a\nb")
