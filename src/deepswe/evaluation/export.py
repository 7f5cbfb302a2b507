"""Predictions and submission folders of SWE-bench, out of recorded attempts.

A prediction has the three keys that the official evaluation reads: instance_id, model_name_or_path and model_patch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepswe.atomic import write_atomically
from deepswe.errors import ConfigError
from deepswe.evaluation.export_trajectories import FORMATS, Exporter
from deepswe.evaluation.metrics import outcomes_by_task, pass_at_1
from deepswe.evaluation.summary import used_by
from deepswe.scaling.candidates import Candidate, prediction
from deepswe.types import Trajectory

Row = dict[str, Any]


def choose_attempt(trajectories: Iterable[Trajectory], attempt: int) -> tuple[Trajectory, ...]:
    """That attempt at each task: one run over the tasks, sorted by task.

    Raises:
        ConfigError: there is none of that number.
    """
    held = tuple(trajectories)
    chosen = tuple(sorted((t for t in held if t.attempt == attempt), key=lambda t: t.task_id))
    if not chosen:
        there = ", ".join(map(str, sorted({t.attempt for t in held}))) or "none"
        raise ConfigError(f"there is no attempt {attempt} in this evaluation; it has the attempts {there}")
    return chosen


def predictions(trajectories: Iterable[Trajectory], *, model: str) -> list[Row]:
    """One a trajectory; of an attempt that reached nothing the patch is empty."""
    return [dict(prediction(Candidate(t.task_id, "", t.artifact), model=model)) for t in trajectories]


def write_predictions(rows: Sequence[Row], out: Path) -> None:
    """Write them as `out` says: .jsonl, .json (an object by task), or a directory with TASK/TASK.pred each.

    Raises:
        ConfigError: two are of one task.
        OSError: it cannot be written.
    """
    by_task = {row["instance_id"]: row for row in rows}
    if len(by_task) < len(rows):
        raise ConfigError(f"{len(rows)} predictions are of {len(by_task)} tasks; a file holds one a task")
    if out.suffix == ".jsonl":
        write_atomically(out, "".join(json.dumps(row) + "\n" for row in rows))
    elif out.suffix == ".json":
        write_atomically(out, json.dumps(by_task, indent=2) + "\n")
    else:
        for name, row in [(_file_name(task), row) for task, row in by_task.items()]:
            write_atomically(out / name / f"{name}.pred", json.dumps(row) + "\n")


def _file_name(task: str) -> str:
    """A task's id as the name of a file or a directory.

    Raises:
        ConfigError: it is none, or would lead out of the directory.
    """
    if task in ("", ".", "..") or not task.isprintable() or set(task) & set("/\\") or len(task.encode()) > 200:
        raise ConfigError(
            f"task {task[:80]!r} cannot name a file; export it as predictions in one file (--out NAME.jsonl)"
        )
    return task


def write_trajectories(trajectories: Iterable[Trajectory], out: Path, *, form: str, exporter: Exporter) -> int:
    """Write TASK/TASK.traj (or as the format names it) each; returns how many.

    Raises:
        ConfigError: there is no such format.
        OSError: it cannot be written.
    """
    if form not in FORMATS:
        raise ConfigError(f"there is no trajectory format {form!r}; there are {', '.join(FORMATS)}")
    suffix, convert = FORMATS[form]
    count = 0
    for name, trajectory in [(_file_name(trajectory.task_id), trajectory) for trajectory in trajectories]:
        write_atomically(out / name / f"{name}{suffix}", json.dumps(convert(exporter, trajectory), indent=2) + "\n")
        count += 1
    return count


def write_submission(
    trajectories: Sequence[Trajectory], out: Path, *, exporter: Exporter, name: str, site: str, open_model: bool
) -> None:
    """The folder that the leaderboard of SWE-bench asks for: all_preds.jsonl, metadata.yaml, README.md and trajs/.

    `logs/` is left to the official evaluation, which writes it; nothing here pretends to be its output.

    Args:
        trajectories: one a task.
        out: the folder, named DATE_NAME by the leaderboard's custom.
        exporter: names the model.
        name: shown on the leaderboard.
        site: address of the project.
        open_model: whether its weights can be had.
    """
    for trajectory in trajectories:
        _file_name(trajectory.task_id)  # all or none
    write_predictions(predictions(trajectories, model=exporter.model), out / "all_preds.jsonl")
    write_atomically(out / "metadata.yaml", _metadata(name, site, exporter.model, open_model))
    write_atomically(out / "README.md", _readme(trajectories, name, exporter.model))
    for trajectory in trajectories:
        record = FORMATS["swe-agent"][1](exporter, trajectory)
        write_atomically(out / "trajs" / f"{trajectory.task_id}.traj", json.dumps(record, indent=2) + "\n")


def _metadata(name: str, site: str, model: str, open_model: bool) -> str:
    """YAML; every text is a JSON string, which YAML reads alike."""
    quoted: Mapping[str, str] = {key: json.dumps(value) for key, value in (("name", name), ("site", site))}
    return (
        f"info:\n  name: {quoted['name']}\n  site: {quoted['site']}\n"
        "tags:\n  checked: false\n"
        f"  model:\n    - {json.dumps(model)}\n"
        f'  os_model: {json.dumps(open_model)}\n  os_system: true\n  system:\n    attempts: "1"\n'
    )


def _readme(trajectories: Sequence[Trajectory], name: str, model: str) -> str:
    outcomes = outcomes_by_task(trajectories)
    used = [used_by(trajectory) for trajectory in trajectories]
    steps = sum(one.steps for one in used) / max(len(used), 1)
    dollars = sum(one.dollars for one in used)
    ours = ""
    if any(outcomes.values()):
        estimate = pass_at_1(outcomes)
        ours = (
            f"\nGraded by deepswe itself: {estimate.mean:.1%} of {estimate.tasks} tasks (95% interval "
            f"{estimate.low:.1%} to {estimate.high:.1%}). The official evaluation decides; its logs belong "
            "in `logs/`.\n"
        )
    return (
        f"# {name}\n\nModel: {model}. One attempt a task, {len(trajectories)} tasks, {steps:.1f} steps an attempt"
        f"{f', {dollars:.2f} dollars in all' if dollars else ''}. Patches were submitted as they are: no hidden tests, "
        "no network and no later commits in the agent's sandbox, no choice among several attempts.\n"
        f"{ours}\n- `all_preds.jsonl`: predictions\n- `trajs/`: how each came about\n"
    )
