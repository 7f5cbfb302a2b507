"""The evaluations in a run directory: which were made, under which phase, and the attempts that count.

    runs/NAME/evaluations.json      phase -> what was evaluated, its budget, and its table once it is over
    runs/NAME/requests.jsonl        every try of every request to an endpoint, append-only
    runs/NAME/trajectories/eval_*   attempts; a further call with more tasks or attempts adds a segment

A phase is named after the split and a hash of all that can change an outcome, so that attempts of one policy, or under
one budget, are never taken for those of another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepswe import __version__
from deepswe.atomic import write_atomically
from deepswe.config import Recipe
from deepswe.errors import StoreError
from deepswe.regular import read_regular
from deepswe.rollout.store import TrajectoryStore
from deepswe.shapes import misfit, misfit_in_record
from deepswe.types import Ending, Trajectory

FILE = "evaluations.json"
PREFIX = "eval_"
_ENTRY: Mapping[str, Any] = {
    "policy.name": str,
    "policy.kind": str,
    "split": str,
    "attempts": int,
    "limit": int,
    "budget": Mapping[str, float],
    **dict.fromkeys((f"budget.{name}" for name in ("steps", "tokens", "turn_tokens")), int),
    **dict.fromkeys((f"budget.{name}" for name in ("dollars", "wall_s", "generation_s")), float),
}
"""What each entry has -> of which kind."""
_UNHASHED: Mapping[str, set[str]] = {
    "rollout": {"tasks_per_step", "group_size", "temperature", "concurrency", "max_retries"},
    "sandbox": {"concurrency", "start_timeout_s", "starts_per_s", "warm", "lifetime_s"},
}
"""Settings of these sections that change no outcome of an evaluation."""


def config_hash(recipe: Recipe, identity: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits over all that can change the outcome of an attempt.

    Args:
        recipe: its tasks, agent, limits, sandbox, seed and temperature of evaluation.
        identity: of the policy.
    """
    parts = {
        "deepswe": __version__,
        "policy": dict(identity),
        "seed": recipe.run.seed,
        "temperature": recipe.evaluation.temperature,
        "tasks": recipe.tasks.model_dump(mode="json"),
        "agent": recipe.agent.model_dump(mode="json"),
        "rollout": recipe.rollout.model_dump(mode="json", exclude=_UNHASHED["rollout"]),
        "sandbox": recipe.sandbox.model_dump(mode="json", exclude=_UNHASHED["sandbox"]),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def phase_of(split: str, digest: str) -> str:
    """The phase of an evaluation."""
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9]', '_', split)}_{digest}"


def read_manifest(run: Path) -> dict[str, dict[str, Any]]:
    """Phase -> entry; empty where nothing was evaluated.

    Raises:
        StoreError: the file is none of ours.
    """
    path = run / FILE
    if not path.exists():
        return {}
    try:
        manifest = json.loads(read_regular(path))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}); move it away and evaluate again with --resume") from error
    except RecursionError as error:
        raise StoreError(f"{path} is nested too deeply; move it away and evaluate again with --resume") from error
    wrong = misfit(manifest, Mapping[str, Mapping[str, Any]], FILE)
    if wrong := wrong or next(filter(None, (misfit_in_record(e, _ENTRY, name) for name, e in manifest.items())), ""):
        raise StoreError(f"{path} is no list of evaluations ({wrong}); move it away and evaluate again with --resume")
    return dict(manifest)


def write_entry(run: Path, phase: str, entry: Mapping[str, Any]) -> None:
    """Add or replace the entry of one phase."""
    manifest = {**read_manifest(run), phase: dict(entry)}
    write_atomically(run / FILE, json.dumps(manifest, indent=2) + "\n")


def recorded(store: TrajectoryStore, phase: str) -> tuple[Trajectory, ...]:
    """The attempts of a phase that count, sorted: of each (task, attempt) the last that the infrastructure did not end.

    An attempt that it did end is there only where no later one replaced it.
    """
    return latest(store.read(phase))


def latest(trajectories: Iterable[Trajectory]) -> tuple[Trajectory, ...]:
    """Of each (task, attempt) the last that counts; see `recorded`."""
    found: dict[tuple[str, int], Trajectory] = {}
    for trajectory in trajectories:
        key = (trajectory.task_id, trajectory.attempt)
        if key not in found or trajectory.ending is not Ending.ERROR:
            found[key] = trajectory
    return tuple(sorted(found.values(), key=lambda trajectory: trajectory.key))


def next_segment(store: TrajectoryStore, phase: str) -> int:
    """The number of the first segment of the phase that is not committed."""
    return sum(name == phase for name, _ in store.segments())
