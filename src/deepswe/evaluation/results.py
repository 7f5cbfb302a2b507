"""Results that can be set side by side: of a run of ours, of a published list, of a report of SWE-bench's evaluation.

A published list names the tasks that were resolved and counts all; a report of the official evaluation lists tasks by
what became of them. Both say nothing about the budget, which is then unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from deepswe.errors import ConfigError, StoreError
from deepswe.evaluation.evaluations import PREFIX, latest, read_manifest
from deepswe.evaluation.metrics import Outcomes, outcomes_by_task
from deepswe.regular import read_regular
from deepswe.rollout.store import TrajectoryStore
from deepswe.shapes import misfit
from deepswe.types import Trajectory

MOST_TASKS = 1_000_000
"""Of a published list; a total beyond it is a mistake."""

NOT_MODELS = ("imitation", "reference", "noop")
"""Phases in which nobody is evaluated."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one attempt; 0 is no limit, None unknown."""

    steps: int | None = None
    tokens: int | None = None
    turn_tokens: int | None = None
    dollars: float | None = None
    wall_s: float | None = None
    generation_s: float | None = None

    def unequal(self, other: Budget) -> dict[str, tuple[Any, Any]]:
        """Limits that differ, or that one side does not tell: name -> both values."""
        ours, theirs = asdict(self), asdict(other)
        return {name: (ours[name], theirs[name]) for name in ours if ours[name] is None or ours[name] != theirs[name]}


@dataclass(frozen=True, slots=True)
class Results:
    """What somebody reached.

    Attributes:
        name: for people.
        outcomes: task -> one number an attempt with a verdict; empty for a task that has none.
        budget: of one attempt.
        unlisted: tasks that were not solved and that the source does not name.
        tags: task -> what it can be grouped by, such as {"repo": ...}.
    """

    name: str
    outcomes: Outcomes
    budget: Budget = Budget()
    unlisted: int = 0
    tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Tasks, those without a name included."""
        return len(self.outcomes) + self.unlisted

    def complete(self, tasks: Iterable[str]) -> Results:
        """With those of `tasks` that it does not name as not solved; never more than are unlisted.

        Raises:
            ConfigError: they are too many to be among its own.
        """
        missing = [task for task in dict.fromkeys(tasks) if task not in self.outcomes]
        if not self.unlisted or not missing:
            return self
        if len(missing) > self.unlisted:
            raise ConfigError(
                f"{self.name} leaves {self.unlisted} of its {self.total} tasks unnamed, and {len(missing)} tasks of "
                "the other side are not named in it: they are not of one task set"
            )
        outcomes = {**self.outcomes, **dict.fromkeys(missing, (0.0,))}
        return Results(self.name, outcomes, self.budget, self.unlisted - len(missing), self.tags)


def load_results(spec: str) -> Results:
    """Read what `spec` names.

    Args:
        spec: RUN or RUN:PHASE for a run directory of ours, or the path of a JSON file: a published list
            ({resolved, total}), a report of SWE-bench's evaluation ({resolved_ids, ...}), or one report a task
            ({TASK: {resolved}}). NAME=... before it gives it a name.

    Raises:
        ConfigError: there is nothing of the kind, or several evaluations and none is named.
        StoreError: a record cannot be read.
    """
    label, _, rest = spec.partition("=") if "=" in spec.partition("/")[0] else ("", "", spec)
    return read_report(Path(rest), name=label) if Path(rest).is_file() else _of_run(rest, label)


@dataclass(frozen=True, slots=True)
class Opened:
    """An evaluation of a run of ours.

    Attributes:
        name: for people.
        policy: who acted.
        phase: under which its attempts are recorded.
        text: the streams hold text as bytes, not a model's tokens.
        budget: of one attempt.
        trajectories: that count, sorted.
    """

    name: str
    policy: str
    phase: str
    text: bool
    budget: Budget
    trajectories: tuple[Trajectory, ...]


def open_evaluation(spec: str) -> Opened:
    """The attempts of an evaluation.

    Args:
        spec: RUN or RUN:PHASE; without a phase its only evaluation, or what its training ended with.

    Raises:
        ConfigError: there is none, or several.
        StoreError: a record cannot be read.
    """
    name, _, phase = spec.rpartition(":") if ":" in spec and not Path(spec).exists() else (spec, "", "")
    run = Path(name)
    if not (run / "trajectories").is_dir():
        raise ConfigError(f"{run} is no run directory with trajectories; give RUN, RUN:PHASE or a JSON file of results")
    store = TrajectoryStore(run)
    phases = dict.fromkeys(found for found, _ in store.segments())
    there = [found for found in phases if not found.startswith(NOT_MODELS)]
    chosen = phase or _only(run, there)
    if chosen not in there:
        raise ConfigError(f"{run} has no phase {chosen!r}; it has {', '.join(there) or 'none'}")
    entry = read_manifest(run).get(chosen, {})
    policy = entry.get("policy", {"name": run.name, "kind": "model"})
    return Opened(
        name=f"{run.name} ({policy['name']})" if entry else f"{run.name}:{chosen}",
        policy=policy["name"],
        phase=chosen,
        text=policy["kind"] != "model",
        budget=_entry_budget(run, entry["budget"]) if entry else _recipe_budget(run),
        trajectories=latest(store.read(chosen)),
    )


def _of_run(spec: str, label: str) -> Results:
    found = open_evaluation(spec)
    return Results(
        label or found.name,
        {task: tuple(scores) for task, scores in outcomes_by_task(found.trajectories).items()},
        found.budget,
        tags={trajectory.task_id: trajectory.tags for trajectory in found.trajectories},
    )


def _only(run: Path, there: list[str]) -> str:
    """The phase that is meant where none is named: the only evaluation, or what training ended with."""
    if not there:
        raise ConfigError(f"{run} has no finished evaluation; go on with `deepswe eval ... --resume`")
    evaluations = [name for name in there if name.startswith(PREFIX)]
    last = [name for name in there if name.startswith("after_")]
    for candidates in (evaluations, last, there):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            break
    raise ConfigError(f"{run} has the phases {', '.join(there)}; name one, such as {run}:{there[0]}")


def _entry_budget(run: Path, limits: Mapping[str, Any]) -> Budget:
    if unknown := set(limits) - {item.name for item in fields(Budget)}:
        raise StoreError(
            f"{run} has an evaluation whose budget knows {min(unknown)!r}, which this version of deepswe does not; "
            "use the version that made it"
        )
    return Budget(**limits)


def _recipe_budget(run: Path) -> Budget:
    """Of an evaluation inside a training run, by its recipe."""
    try:
        rollout = json.loads(read_regular(run / "recipe.json"))["rollout"]
        budget = Budget(
            steps=rollout["max_steps"],
            tokens=rollout["max_tokens"],
            turn_tokens=rollout["max_turn_tokens"],
            dollars=0.0,
            wall_s=rollout["trajectory_timeout_s"],
            generation_s=rollout["generation_timeout_s"],
        )
        if wrong := misfit(budget, Budget):
            raise ValueError(wrong)
        return budget
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise StoreError(f"{run}/recipe.json cannot be read ({error}), so that the budget is unknown") from error


def read_report(path: Path, *, name: str = "") -> Results:
    """A published list, or a report of SWE-bench's evaluation; see `load_results`.

    Raises:
        ConfigError: it is neither.
    """
    try:
        record = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); give a file of results") from error
    title = name or path.name.removesuffix(".json").removesuffix(".results")
    if isinstance(record, dict) and isinstance(record.get("resolved"), list):
        return _published(path, record, name or str(record.get("submission") or title))
    if isinstance(record, dict) and isinstance(record.get("resolved_ids"), list):
        return _official(path, record, title)
    if record and not misfit(record, Mapping[str, Mapping[str, Any]], "it"):
        verdicts = {task: row.get("resolved") for task, row in record.items()}
        if wrong := misfit(verdicts, Mapping[str, bool], "resolved"):
            raise ConfigError(f"{path} is no report of SWE-bench's evaluation: {wrong}")
        return Results(title, {task: (float(solved),) for task, solved in verdicts.items()})
    raise ConfigError(
        f"{path} is no list of resolved tasks and no report of SWE-bench's evaluation; give "
        '{"resolved": [...], "total": 500}, a report, or a run'
    )


def _ids(path: Path, record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The tasks that are listed under `key`; none where it is missing or null."""
    listed = record.get(key) or ()
    if wrong := misfit(listed, tuple[str, ...], key):
        raise ConfigError(f"{path} cannot be read: {wrong}; give lists of the names of tasks")
    return tuple(listed)


def _published(path: Path, record: Mapping[str, Any], title: str) -> Results:
    resolved = _ids(path, record, "resolved")
    total = record.get("total", record.get("total_instances"))
    named = {task for key in ("generated", "no_generation", "no_logs") for task in _ids(path, record, key)}
    outcomes = dict.fromkeys(sorted(named), (0.0,)) | dict.fromkeys(sorted(resolved), (1.0,))
    if type(total) is not int or not len(outcomes) <= total <= MOST_TASKS or len(set(resolved)) != len(resolved):
        raise ConfigError(
            f"{path} lists {len(resolved)} resolved tasks of {total!r} in all; check its total and its list"
        )
    return Results(title, outcomes, unlisted=total - len(outcomes))


def _official(path: Path, record: Mapping[str, Any], title: str) -> Results:
    """A task whose evaluation failed, or was never made, has no verdict; one without a patch is not solved."""
    outcomes: dict[str, tuple[float, ...]] = {}
    for key, scores in (
        ("submitted_ids", ()),
        ("incomplete_ids", ()),
        ("error_ids", ()),
        ("empty_patch_ids", (0.0,)),
        ("unresolved_ids", (0.0,)),
        ("infra_failure_ids", ()),
        ("resolved_ids", (1.0,)),
    ):
        outcomes |= dict.fromkeys(_ids(path, record, key), scores)
    return Results(title, dict(sorted(outcomes.items())))
