"""Which attempts a reader should see: a light note of every attempt, a choice among them, and the chosen ones whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Ending, Trajectory

Verdict = Literal["solved", "unsolved", "no verdict"]

LONGEST_TAG = 80
_EVALUATIONS = ("before", "step", "after")
_ORDER = {"imitation": 0, "before": 1, "train": 2, "step": 3, "after": 4}


@dataclass(frozen=True, slots=True)
class AttemptNote:
    """What remains of an attempt when its text and tokens are left out.

    Attributes:
        name, split: of an evaluation, such as "before" and "heldout"; otherwise the phase and "".
        tags: the short ones, by which tasks may be grouped.
    """

    phase: str
    name: str
    split: str
    step: int
    task_id: str
    attempt: int
    ending: Ending
    reward: float | None
    tags: Mapping[str, str]

    @property
    def key(self) -> tuple[str, int, str, int]:
        """As `Trajectory.key`."""
        return (self.phase, self.step, self.task_id, self.attempt)

    @property
    def verdict(self) -> Verdict:
        """Solved is the full reward; no verdict is neither."""
        return _verdict(self.reward)

    @property
    def label(self) -> str:
        """The phase for readers."""
        return f"{self.name}, {self.split}" if self.split else self.name


@dataclass(frozen=True, slots=True)
class Sample:
    """An attempt to show, and under which heading."""

    title: str
    verdict: Verdict
    trajectory: Trajectory


def note_attempts(store: TrajectoryStore) -> tuple[AttemptNote, ...]:
    """One note per committed trajectory, in the order of a run: imitation, before, training, in between, after.

    Raises:
        StoreError: a record is damaged.
    """
    notes = (_note(trajectory) for trajectory in store.heads())
    return tuple(sorted(notes, key=lambda note: (_ORDER.get(note.name, 5), note.split, note.key)))


def phase_order(phase: str) -> tuple[int, str]:
    """Sorts phases as a run goes through them: imitation, before, training, in between, after, others."""
    name, _, split = phase.partition("_")
    return (_ORDER.get(name, 5), split)


def choose_samples(notes: Sequence[AttemptNote], *, each: int = 3) -> dict[tuple[str, int, str, int], str]:
    """Keys of the attempts to show -> heading: a few unsolved and solved before and after training.

    Where it can be, the same tasks are shown unsolved before and solved after, of different kinds. Without an
    evaluation the last training step is shown. The choice depends on the notes alone.
    """
    before = [note for note in notes if note.name == "before"]
    after = [note for note in notes if note.name == "after"]
    if not before and not after:
        last = max((note.step for note in notes if note.name == "train"), default=0)
        before = [note for note in notes if (note.name, note.step) == ("train", last)]
    failed_before = {note.task_id for note in before if note.verdict == "unsolved"}
    solved_after = {note.task_id for note in after if note.verdict == "solved"}
    learned = failed_before & solved_after
    first = "Before training" if after or any(note.name == "before" for note in before) else "Last training step"
    chosen: dict[tuple[str, int, str, int], str] = {}
    for title, group, verdict, preferred in (
        (first, before, "unsolved", learned),
        (first, before, "solved", set()),
        ("After training", after, "solved", learned),
        ("After training", after, "unsolved", set()),
        (first, before, "no verdict", set()),
        ("After training", after, "no verdict", set()),
    ):
        few = 1 if verdict == "no verdict" else each
        matching = [note for note in group if note.verdict == verdict]
        for note in _spread(matching, few, preferred):
            chosen[note.key] = f"{title}: {verdict}"
    return chosen


def read_samples(store: TrajectoryStore, chosen: Mapping[tuple[str, int, str, int], str]) -> tuple[Sample, ...]:
    """The chosen trajectories, in the order of the choice."""
    found = {
        trajectory.key: trajectory
        for phase, step in dict.fromkeys((key[0], key[1]) for key in chosen)
        for trajectory in store.committed(phase, step) or ()
        if trajectory.key in chosen
    }
    return tuple(
        Sample(title, _verdict(found[key].reward), found[key]) for key, title in chosen.items() if key in found
    )


def _spread(notes: Iterable[AttemptNote], count: int, preferred: set[str]) -> list[AttemptNote]:
    """The first attempt at each of `count` tasks: preferred tasks first, and among them other kinds first."""
    tasks: dict[str, AttemptNote] = {}
    for note in notes:
        tasks.setdefault(note.task_id, note)
    seen: dict[str, int] = {}
    ranked: list[tuple[bool, int, int, AttemptNote]] = []
    for note in sorted(tasks.values(), key=lambda note: note.task_id not in preferred):
        kind = note.tags.get("kind", "")
        seen[kind] = seen.get(kind, 0) + 1
        ranked.append((note.task_id not in preferred, seen[kind], len(ranked), note))
    return [note for *_, note in sorted(ranked, key=lambda item: item[:3])[:count]]


def _note(trajectory: Trajectory) -> AttemptNote:
    name, _, split = trajectory.phase.partition("_")
    if name not in _EVALUATIONS:
        name, split = trajectory.phase, ""
    return AttemptNote(
        trajectory.phase,
        name,
        split,
        trajectory.step,
        trajectory.task_id,
        trajectory.attempt,
        trajectory.ending,
        trajectory.reward,
        {key: value for key, value in trajectory.tags.items() if len(value) <= LONGEST_TAG},
    )


def _verdict(reward: float | None) -> Verdict:
    if reward is None:
        return "no verdict"
    return "solved" if reward >= 1.0 else "unsolved"
