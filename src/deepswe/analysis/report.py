"""One offline HTML file that shows a run: what it reached, how, from which rewards, and what the attempts look like."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from deepswe.analysis.charts import draw_before_after, draw_panel
from deepswe.analysis.harmless import clip, harmless
from deepswe.analysis.panels import Panel, imitation_panels, run_panels, run_warnings
from deepswe.analysis.record import Row, RunRecord, number, read_run, total
from deepswe.analysis.samples import AttemptNote, Sample, choose_samples, note_attempts, read_samples
from deepswe.analysis.viewer.tokenizer import decoder_of
from deepswe.atomic import write_atomically
from deepswe.errors import RunError
from deepswe.evaluation.metrics import TASKS_A_GROUP, Difference, Estimate, paired_difference, pass_at_1
from deepswe.rollout.canaries import CANARY, KINDS
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Trajectory

IMITATION = "imitation"
"""The phase of the reference solver's trajectories."""
SHOWN_TESTS = 60
LARGEST_GROUPING = 24
NOT_GROUPED = ("split", "issue", CANARY)
"""Tags of a trajectory that no table is made by."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The main figure of a run: pass@1 of one split, before and, once it is known, after."""

    split: str
    before: Estimate
    after: Estimate | None
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class GroupLine:
    """One line of a table by bug kind, repository or whatever else the tasks are tagged with."""

    split: str
    value: str
    before: Estimate | None
    after: Estimate | None
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class CountLine:
    """The attempts of one phase: how many, by ending and by grade."""

    label: str
    attempts: int
    counts: Mapping[str, int]


def write_report(run_dir: Path, *, opening: Callable[[Sequence[int]], str] | None = None) -> Path:
    """Write `run_dir`/report.html from the records of a run, which may still be going on.

    Args:
        run_dir: a run directory.
        opening: decodes the first tokens of an attempt into the text that the model was given, for samples without a
            tag "issue"; None takes the tokenizer of the run's newest checkpoint, if there is one.

    Returns:
        The path of the report: one file that needs no network, no script and no other file.

    Raises:
        RunError: the directory does not exist, a record or the tokenizer in it is damaged, or the report cannot be
            written.
        StoreError: a trajectory cannot be read.
    """
    run = read_run(run_dir)
    page = render_report(run, opening=opening)
    path = run_dir / "report.html"
    try:
        write_atomically(path, page)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path


def render_report(run: RunRecord, *, opening: Callable[[Sequence[int]], str] | None = None) -> str:
    """The page as text; encodes in UTF-8 whatever the records hold."""
    store = TrajectoryStore(run.directory)
    notes = note_attempts(store)
    headlines = make_headlines(notes)
    samples = read_samples(store, choose_samples(notes))
    decode = opening or decoder_of(run, None)
    tested = [row for row in run.rows if number(row, "grade_runs") is not None]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_finalize)
    environment.filters.update(
        {"share": _share, "points": _points, "count": _count, "duration": _duration, "clip": clip, "words": _words}
    )
    template = resources.files("deepswe.analysis").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        run=run,
        headlines=headlines,
        lift=_lift(headlines),
        panels=[_drawn(panel) for panel in run_panels(run)],
        warnings=run_warnings(run),
        imitation=[_drawn(panel) for panel in imitation_panels(run)],
        evaluations=[_evaluation_line(row) for row in run.of_kind("evaluation")],
        groupings=make_groupings(notes),
        counts=make_counts(notes),
        signs=make_signs(notes),
        test_runs=total(tested, "grade_runs"),
        test_runs_reused=total(tested, "grade_reused"),
        test_runs_where="in all" if {"train", "evaluation"} <= {row["kind"] for row in tested} else "in training",
        imitated=sum(note.name == IMITATION for note in notes),
        last_step=max((int(row["step"]) for row in run.of_kind("train")), default=0),
        samples=[_sample_view(sample, decode) for sample in samples],
        recipe=flatten(run.recipe),
        versions=flatten(run.environment),
    )


def make_headlines(notes: Sequence[AttemptNote]) -> tuple[Headline, ...]:
    """pass@1 of each split before training and, where it was evaluated again, after; paired by task."""
    found = []
    for split in dict.fromkeys(note.split for note in notes if note.name == "before"):
        before = _outcomes(note for note in notes if (note.name, note.split) == ("before", split))
        after = _outcomes(note for note in notes if (note.name, note.split) == ("after", split))
        estimate = _estimate(before)
        if estimate is not None:
            found.append(Headline(split, estimate, _estimate(after), _difference(before, after)))
    return tuple(found)


def make_groupings(notes: Sequence[AttemptNote]) -> dict[str, tuple[GroupLine, ...]]:
    """For each tag that divides the evaluated tasks into a readable number of groups, of two tasks or more on average:
    pass@1 by split and value."""
    evaluated = [note for note in notes if note.name in ("before", "after")]
    keys = dict.fromkeys(key for note in evaluated for key in note.tags if key not in NOT_GROUPED)
    tasks = len({(note.split, note.task_id) for note in evaluated})
    tables = {}
    for key in sorted(keys, key=lambda key: (key != "kind", list(keys).index(key))):
        groups = sorted({(note.split, note.tags.get(key, "")) for note in evaluated})
        if 1 < len(groups) <= min(LARGEST_GROUPING, tasks // TASKS_A_GROUP) and len({value for _, value in groups}) > 1:
            tables[key] = tuple(_group_line(evaluated, key, split, value) for split, value in groups)
    return tables


def make_counts(notes: Sequence[AttemptNote]) -> tuple[CountLine, ...]:
    """Attempts by ending and by grade, one line a phase and one for all. The reference solver's are not graded."""
    notes = [note for note in notes if note.name != IMITATION]
    lines = []
    for label in dict.fromkeys(note.label for note in notes):
        lines.append(_count_line(label, [note for note in notes if note.label == label]))
    if len(lines) > 1:
        lines.append(_count_line("all", notes))
    return tuple(lines)


def make_signs(notes: Sequence[AttemptNote]) -> tuple[CountLine, ...]:
    """Attempts by sign of cheating, one line a phase that has any."""
    lines = []
    for label in dict.fromkeys(note.label for note in notes if note.tags.get(CANARY)):
        held = [note for note in notes if note.label == label]
        found = [kind for note in held for kind in note.tags.get(CANARY, "").split(",")]
        lines.append(CountLine(label, len(held), {kind: found.count(kind) for kind in KINDS}))
    return tuple(lines)


def flatten(tree: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """A tree of settings as section -> key -> value text; nested keys are joined by dots."""
    sections: dict[str, dict[str, str]] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            sections[str(key)] = {name: _plain(leaf) for name, leaf in _leaves(value)}
        else:
            sections.setdefault("", {})[str(key)] = _plain(value)
    return dict(sorted(sections.items(), key=lambda item: item[0] != ""))


def _leaves(tree: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from ((f"{key}.{name}", leaf) for name, leaf in _leaves(value))
        else:
            yield str(key), value


def _plain(value: Any) -> str:
    return clip(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), characters=400)


def _finalize(value: Any) -> Any:
    """Jinja calls this on every value it prints: plain text is made visible, markup of our own passes."""
    return harmless(value) if type(value) is str else value


def _drawn(panel: Panel) -> dict[str, Any]:
    return {"panel": panel, "svg": draw_panel(panel), "legend": len(panel.series) > 1}


def _lift(headlines: Sequence[Headline]) -> str:
    rows = [
        (h.split, (h.before.mean, h.before.low, h.before.high), (h.after.mean, h.after.low, h.after.high))
        for h in headlines
        if h.after is not None
    ]
    return draw_before_after(rows) if rows else ""


def _evaluation_line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {key: number(row, key) for key in ("pass_at_1", "low", "high", "tasks", "attempts")}
    grades = row.get("grades")
    line["ungraded"] = grades.get("ungraded") if isinstance(grades, dict) else None
    return line | {"name": str(row.get("name", "")), "split": str(row.get("split", "")), "step": row["step"]}


def _outcomes(notes: Iterable[AttemptNote]) -> dict[str, list[float]]:
    outcomes: dict[str, list[float]] = {}
    for note in notes:
        scores = outcomes.setdefault(note.task_id, [])
        if note.reward is not None:
            scores.append(float(note.reward >= 1.0))
    return outcomes


def _estimate(outcomes: Mapping[str, Sequence[float]]) -> Estimate | None:
    return pass_at_1(outcomes) if any(outcomes.values()) else None


def _difference(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Difference | None:
    both = any(scores and after.get(task) for task, scores in before.items())
    return paired_difference(before, after) if both else None


def _group_line(notes: Sequence[AttemptNote], key: str, split: str, value: str) -> GroupLine:
    members = [note for note in notes if note.split == split and note.tags.get(key, "") == value]
    before = _outcomes(note for note in members if note.name == "before")
    after = _outcomes(note for note in members if note.name == "after")
    return GroupLine(split, value or "none", _estimate(before), _estimate(after), _difference(before, after))


def _count_line(label: str, notes: Sequence[AttemptNote]) -> CountLine:
    counts = {ending.value: sum(note.ending is ending for note in notes) for ending in Ending}
    solved = sum(note.reward is not None and note.reward >= 1.0 for note in notes)
    without = sum(note.reward is None for note in notes)
    counts |= {"graded 1": solved, "graded below 1": len(notes) - solved - without, "ungraded": without}
    return CountLine(label, len(notes), counts)


def _sample_view(sample: Sample, opening: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    trajectory = sample.trajectory
    statuses = dict(getattr(trajectory.grade, "statuses", {}))
    failing_first = sorted(statuses.items(), key=lambda item: (item[1] == "passed", item[0]))
    return {
        "title": sample.title,
        "verdict": sample.verdict,
        "trajectory": trajectory,
        "issue": _issue(trajectory, opening),
        "diff": _diff_lines(trajectory.artifact),
        "reason": getattr(trajectory.grade, "reason", "") or getattr(trajectory.grade, "error", ""),
        "tests": failing_first[:SHOWN_TESTS],
        "tests_left_out": max(0, len(failing_first) - SHOWN_TESTS),
    }


def _issue(trajectory: Trajectory, opening: Callable[[Sequence[int]], str] | None) -> str:
    if issue := trajectory.tags.get("issue", ""):
        return issue
    first = trajectory.spans[0] if trajectory.spans else None
    return opening(first.tokens) if opening is not None and first is not None and not first.sampled else ""


def _diff_lines(diff: str) -> list[tuple[str, str]]:
    """(class, line) of each line of a unified diff."""
    marks = {"+": "add", "-": "del", "@": "hunk"}
    lines = []
    for line in clip(diff).split("\n") if diff else []:
        heading = line.startswith(("+++ ", "--- ", "diff ", "index "))
        lines.append(("head" if heading else marks.get(line[:1], "same"), line))
    return lines


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole % 60} s"
    return "under 0.01 s" if seconds < 0.01 else f"{seconds:.3g} s"


def _words(text: str) -> str:
    return text.replace("_", " ")
