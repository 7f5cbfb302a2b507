"""Candidates: what agents, ours or anyone's, propose for tasks. Keyed by (task, candidate) everywhere.

Read from a run of ours, from SWE-bench predictions (JSON list, JSON object or JSONL), and from the trajectory files of
mini-swe-agent (`*.traj.json`) and SWE-agent (`*.traj`). A record that is none of these is refused with its place and
reason; the others go on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepswe.errors import ConfigError
from deepswe.regular import read_regular
from deepswe.rollout.store import TrajectoryStore
from deepswe.scaling.patches import patch_key
from deepswe.types import Graded, Message, Trajectory

ROLES: Mapping[str, str] = {"ai": "assistant", "agent": "assistant", "demo": "user", "exit": "user"}
"""Names of roles in foreign files -> ours."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One proposed patch.

    Attributes:
        task_id: the task that it is for.
        name: unique among the task's candidates.
        patch: unified diff; "" proposes nothing.
        turns: how the agent came to it, if that is known.
        outcome: 1.0 if it solves the task, 0.0 if not, None if nobody graded it. Never seen by a selector.
        tokens: that the agent sampled, 0 if unknown.
        issue: of the task, "" if unknown.
        tags: what its task is grouped by, such as "repo".
    """

    task_id: str
    name: str
    patch: str
    turns: tuple[Message, ...] = ()
    outcome: float | None = None
    tokens: int = 0
    issue: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """(task, candidate)."""
        return (self.task_id, self.name)

    @property
    def patch_key(self) -> str:
        """Equal for patches that make the same edits."""
        return patch_key(self.patch)


@dataclass(frozen=True, slots=True)
class Refused:
    """A record that is no candidate: where it stands and why."""

    place: str
    reason: str


def from_trajectory(trajectory: Trajectory) -> Candidate:
    """A trajectory of ours. Its name holds its phase, step and attempt; an ungraded one has no outcome."""
    turns = []
    for step in trajectory.steps:
        turns.append(Message("assistant", step.completion))
        if step.observation:
            turns.append(Message("user", step.observation))
    outcome = float(trajectory.grade.reward >= 1.0) if isinstance(trajectory.grade, Graded) else None
    name = f"{trajectory.phase}-{trajectory.step}-{trajectory.attempt}"
    return Candidate(
        trajectory.task_id,
        name,
        trajectory.artifact,
        tuple(turns),
        outcome,
        trajectory.sampled_length,
        trajectory.tags.get("issue", ""),
        trajectory.tags,
    )


def load_candidates(path: Path, *, phase: str | None = None) -> tuple[tuple[Candidate, ...], tuple[Refused, ...]]:
    """Read candidates from a run directory, a predictions file, or a directory of trajectory files.

    Args:
        path: which.
        phase: of a run of ours, only this phase, such as "after_heldout"; None takes all but the reference solver's.

    Returns:
        The candidates, sorted by (task, name), and what was refused. Two records of one task and name get the
        names NAME, NAME#2, ...; nothing is overwritten.

    Raises:
        ConfigError: there is nothing of the kind at `path`, or no candidate in it.
    """
    if (path / "trajectories").is_dir():
        found: list[Candidate | Refused] = list(_of_run(path, phase))
    elif path.is_dir():
        files = sorted(file for pattern in ("*.traj", "*.traj.json") for file in path.rglob(pattern))
        found = [_read_trajectory_file(file) for file in files]
    elif path.is_file():
        found = list(_read_predictions(path))
    else:
        raise ConfigError(f"{path} is no run, predictions file or directory of trajectories; give one of these")
    candidates = _named_apart(item for item in found if isinstance(item, Candidate))
    refused = tuple(item for item in found if isinstance(item, Refused))
    if not candidates:
        why = f": {refused[0].place}: {refused[0].reason}" if refused else ""
        raise ConfigError(f"{path} holds no candidate{why}")
    return candidates, refused


def _of_run(path: Path, phase: str | None) -> Iterator[Candidate]:
    store = TrajectoryStore(path)
    there = [name for name in dict.fromkeys(name for name, _ in store.segments()) if name != "imitation"]
    if not there:
        raise ConfigError(f"{path} has no finished evaluation; go on with `deepswe eval ... --resume`")
    if phase is not None and phase not in there:
        raise ConfigError(f"{path} has no phase {phase!r}; it has {', '.join(there)}")
    return (from_trajectory(t) for name in there if phase in (None, name) for t in store.read(name))


def _named_apart(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    seen: Counter[tuple[str, str]] = Counter()
    apart = []
    for candidate in candidates:
        seen[candidate.key] += 1
        number = seen[candidate.key]
        apart.append(candidate if number == 1 else replace(candidate, name=f"{candidate.name}#{number}"))
    return tuple(sorted(apart, key=lambda candidate: candidate.key))


def _read_predictions(path: Path) -> Iterator[Candidate | Refused]:
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) and "instance_id" not in whole:
        for task_id, row in whole.items():
            yield _prediction(f"{path}: {task_id}", {"instance_id": task_id, **row} if isinstance(row, dict) else row)
    elif whole is not None:
        for number, row in enumerate(whole if isinstance(whole, list) else [whole], start=1):
            yield _prediction(f"{path}: record {number}", row)
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield Refused(f"{path}:{number}", f"not JSON ({error})")
                else:
                    yield _prediction(f"{path}:{number}", row)


def _prediction(place: str, row: Any) -> Candidate | Refused:
    if not isinstance(row, dict):
        return Refused(place, "not an object with instance_id, model_name_or_path and model_patch")
    task_id, name, patch = row.get("instance_id"), row.get("model_name_or_path", "candidate"), row.get("model_patch")
    if not isinstance(task_id, str) or not task_id:
        return Refused(place, f"instance_id is {task_id!r}, not the name of a task")
    if patch is not None and not isinstance(patch, str):
        return Refused(place, f"model_patch is a {type(patch).__name__}, not a diff")
    turns = _turns(row.get("messages") or row.get("trajectory") or row.get("history") or [])
    return Candidate(task_id, str(name), patch or "", turns)


def _read_trajectory_file(path: Path) -> Candidate | Refused:
    try:
        record = json.loads(read_regular(path).decode("utf-8", "surrogateescape"))
    except (OSError, ValueError, RecursionError) as error:
        return Refused(str(path), f"cannot be read as JSON ({error})")
    info = record.get("info") if isinstance(record, dict) else None
    if not isinstance(info, dict):
        return Refused(str(path), "no `info` in it; not a trajectory of mini-swe-agent or SWE-agent")
    name = path.name.removesuffix(".json").removesuffix(".traj")
    task_id = str(record.get("instance_id") or info.get("instance_id") or name)
    patch = info.get("submission")
    if patch is not None and not isinstance(patch, str):
        return Refused(str(path), f"info.submission is a {type(patch).__name__}, not a diff")
    turns = _turns(record.get("messages") or record.get("trajectory") or record.get("history") or [])
    group = path.parent.name if path.parent.name != name else path.parent.parent.name
    return Candidate(task_id, group, patch or "", turns)


def _turns(rows: Any) -> tuple[Message, ...]:
    """The messages of a foreign record: {role, content} or SWE-agent's {response | thought, action, observation}."""
    turns: list[Message] = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict):
            continue
        if "role" in row:
            role = ROLES.get(str(row["role"]), str(row["role"]))
            known = role if role in ("system", "user", "assistant", "tool") else "user"
            turns.append(Message(known, _text(row.get("content"))))  # type: ignore[arg-type]
        elif "action" in row:
            said = row.get("response") or "\n".join(_text(row.get(key)) for key in ("thought", "action"))
            turns.append(Message("assistant", _text(said)))
            if row.get("observation"):
                turns.append(Message("user", _text(row["observation"])))
    return tuple(turns)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def by_task(candidates: Iterable[Candidate]) -> dict[str, tuple[Candidate, ...]]:
    """Task -> its candidates, both sorted by name."""
    grouped: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.key):
        grouped.setdefault(candidate.task_id, []).append(candidate)
    return {task_id: tuple(group) for task_id, group in grouped.items()}


def prediction(candidate: Candidate, *, model: str) -> dict[str, str]:
    """The record that SWE-bench's evaluation reads."""
    return {"instance_id": candidate.task_id, "model_name_or_path": model, "model_patch": candidate.patch}


def count_tokens(candidates: Sequence[Candidate]) -> int:
    """That the agents sampled for all of them."""
    return sum(candidate.tokens for candidate in candidates)
