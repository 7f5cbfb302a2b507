"""Behaviour in numbers: of one attempt, of many, of solved against unsolved ones, and over the steps of a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from deepswe.algorithms.filters import turns
from deepswe.analysis.behaviour import TESTING, Action, Seen, classify, thought_of
from deepswe.evaluation.metrics import paired_difference, pass_at_1
from deepswe.tasks.patches import touched_paths
from deepswe.types import Ending, Step, Trajectory

LONGEST_LOOP = 3
"""Calls in the longest cycle that counts as a loop."""
BINS = 10
"""Groups of training steps in which drift is shown."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The behaviour of one attempt.

    Attributes:
        seen: the class of each turn, with its evidence.
        thinking: class -> tokens of thought in its turns, estimated: a turn's sampled tokens times the share of its
            characters before the call.
        first_edit, first_reproduction: turn, counted from 1; None where there is none.
        touched: paths in the diff that was graded.
        gold: paths in the gold patch; None where it is not known.
        loops: turns in cycles of at most 3 calls that come at least twice more (a single call), or once more.
        undone: changes taken back.
        calls, errors: tool -> calls, and those that failed.
        untested: submitted with an edit that no later turn tested.
    """

    trajectory: tuple[str, int, str, int]
    solved: bool | None
    ending: Ending
    seen: tuple[Seen, ...]
    thinking: Mapping[str, float]
    first_edit: int | None
    first_reproduction: int | None
    touched: frozenset[str]
    gold: frozenset[str] | None
    loops: int
    undone: int
    calls: Mapping[str, int]
    errors: Mapping[str, int]
    untested: bool

    def count(self, *actions: Action) -> int:
        """Turns of these classes."""
        return sum(seen.action in actions for seen in self.seen)

    @property
    def rhythm(self) -> str:
        """Edits (E) and tests (T) in order, each run of the same once: "ETET" edits, tests, edits, tests."""
        marks = ("E" if seen.source else "T" if seen.action in TESTING else "" for seen in self.seen)
        return "".join(mark for mark, _ in groupby(filter(None, marks)))


_NEEDS_GOLD = frozenset({"touched_gold_file", "touched_other_file"})
HABITS: Mapping[str, Callable[[Profile], bool]] = {
    "reproduced": lambda p: p.first_reproduction is not None,
    "tested": lambda p: p.count(*TESTING) > 0,
    "edge_tested": lambda p: p.count(Action.EDGE_TEST) > 0,
    "regression_tested": lambda p: p.count(Action.REGRESSION_TEST) > 0,
    "debugged": lambda p: p.count(Action.DEBUG) > 0,
    "undid": lambda p: p.undone > 0,
    "looped": lambda p: p.loops > 0,
    "repeated": lambda p: p.count(Action.REPEAT) > 0,
    "submitted_untested": lambda p: p.untested,
    "touched_gold_file": lambda p: bool(p.gold) and bool(p.touched & (p.gold or frozenset())),
    "touched_other_file": lambda p: p.gold is not None and bool(p.touched - p.gold),
}
"""What an attempt did or did not do. The last two count for tasks whose gold patch is known."""


def profile(trajectory: Trajectory, gold_patch: str | None = None) -> Profile:
    """The behaviour of one attempt.

    Args:
        gold_patch: of its task, None where it is not known.
    """
    seen = classify(trajectory.steps)
    calls = Counter(step.call.name for step in trajectory.steps if step.call is not None)
    errors = Counter(
        step.call.name for step, one in zip(trajectory.steps, seen, strict=True) if step.call and one.failed
    )
    return Profile(
        trajectory.key,
        None if trajectory.reward is None else trajectory.reward >= 1.0,
        trajectory.ending,
        seen,
        _thinking(trajectory, seen),
        _first(seen, lambda one: one.source),
        _first(seen, lambda one: one.action is Action.REPRODUCE),
        frozenset(touched_paths(trajectory.artifact)),
        None if gold_patch is None else frozenset(touched_paths(gold_patch)),
        count_loops(trajectory.steps),
        sum(one.undo for one in seen),
        calls,
        errors,
        _untested(trajectory.ending, seen),
    )


def count_loops(steps: Sequence[Step]) -> int:
    """Turns that go round in a circle: a call three times in a row, or two or three calls in a row twice over."""
    calls = [step.call and (step.call.name, tuple(sorted(step.call.arguments.items()))) for step in steps]
    inside = [False] * len(calls)
    for length in range(1, LONGEST_LOOP + 1):
        rounds = 3 if length == 1 else 2
        for start in range(len(calls) - length * rounds + 1):
            window = calls[start : start + length * rounds]
            if None not in window and all(window[i] == window[i % length] for i in range(len(window))):
                inside[start : start + len(window)] = [True] * len(window)
    return sum(inside)


def summarise(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Many attempts in numbers; every figure is a mean over attempts unless it says otherwise.

    Returns:
        attempts, turns; share (class -> of all turns); turns_by_class; thinking (class -> estimated tokens a turn of
        that class); first_edit, first_reproduction (means over those that have one); habits (habit -> share with a 95%
        interval clustered by task); undone, loops; edits_a_test (edited turns for each test); gold_recall and
        gold_precision of the touched files; errors (tool -> share of its calls that failed); endings; rhythms (the
        five most frequent).
    """
    turns_in_all = sum(len(p.seen) for p in profiles)
    counts = Counter(seen.action for p in profiles for seen in p.seen)
    thinking: Counter[str] = Counter()
    for p in profiles:
        thinking.update(p.thinking)
    calls, errors = _totals(p.calls for p in profiles), _totals(p.errors for p in profiles)
    tests = sum(p.count(*TESTING) for p in profiles)
    known = [p for p in profiles if p.gold]
    return {
        "attempts": len(profiles),
        "turns": turns_in_all / len(profiles) if profiles else 0.0,
        "share": {action.value: counts[action] / turns_in_all if turns_in_all else 0.0 for action in Action},
        "turns_by_class": {action.value: counts[action] for action in Action},
        "thinking": {action.value: thinking[action] / counts[action] if counts[action] else 0.0 for action in Action},
        "first_edit": _mean(p.first_edit for p in profiles),
        "first_reproduction": _mean(p.first_reproduction for p in profiles),
        "habits": {name: _share(profiles, name) for name in HABITS},
        "undone": _mean(p.undone for p in profiles),
        "loops": _mean(p.loops for p in profiles),
        "edits_a_test": sum(seen.source for p in profiles for seen in p.seen) / tests if tests else None,
        "gold_recall": _mean(len(p.touched & (p.gold or frozenset())) / len(p.gold or ()) for p in known),
        "gold_precision": _mean(len(p.touched & (p.gold or frozenset())) / len(p.touched) for p in known if p.touched),
        "errors": {tool: errors[tool] / count for tool, count in sorted(calls.items())},
        "endings": dict(sorted(Counter(p.ending.value for p in profiles).items())),
        "rhythms": dict(Counter(p.rhythm for p in profiles).most_common(5)),
    }


def compare_solved(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Solved against unsolved attempts: the two summaries, and for each habit the difference within tasks.

    Returns:
        solved, unsolved (as `summarise`), differences (habit -> mean, low, high, tasks: solved minus unsolved over the
        tasks that have both, with a 95% interval; absent where no task has both).
    """
    solved = [p for p in profiles if p.solved]
    unsolved = [p for p in profiles if p.solved is False]
    differences = {}
    for name in HABITS:
        before, after = _by_task(unsolved, name), _by_task(solved, name)
        if before.keys() & after.keys():
            found = paired_difference(before, after)
            differences[name] = {"mean": found.mean, "low": found.low, "high": found.high, "tasks": found.tasks}
    return {"solved": summarise(solved), "unsolved": summarise(unsolved), "differences": differences}


def drift(profiles: Sequence[Profile], *, bins: int = BINS) -> list[dict[str, Any]]:
    """Behaviour over the steps of a training, in at most `bins` groups of steps that follow each other.

    Returns:
        For each group first_step and last_step, and what `summarise` gives.
    """
    steps = sorted({p.trajectory[1] for p in profiles})
    size = max(1, -(-len(steps) // bins))
    rows = []
    for start in range(0, len(steps), size):
        members = set(steps[start : start + size])
        row = summarise([p for p in profiles if p.trajectory[1] in members])
        rows.append({"first_step": min(members), "last_step": max(members), **row})
    return rows


def _thinking(trajectory: Trajectory, seen: Sequence[Seen]) -> dict[str, float]:
    sampled: Counter[int] = Counter()
    for span, turn in zip(trajectory.spans, turns(trajectory.spans), strict=True):
        sampled[turn] += len(span.tokens) if span.sampled else 0
    found: dict[str, float] = {}
    for number, (step, one) in enumerate(zip(trajectory.steps, seen, strict=True)):
        share = len(thought_of(step.completion)) / max(1, len(step.completion))
        found[one.action] = found.get(one.action, 0.0) + sampled[number] * share
    return found


def _untested(ending: Ending, seen: Sequence[Seen]) -> bool:
    last = max((number for number, one in enumerate(seen) if one.source), default=None)
    if last is None or ending is not Ending.SUBMITTED:
        return False
    return not any(one.action in TESTING for one in seen[last + 1 :])


def _first(seen: Sequence[Seen], wanted: Callable[[Seen], bool]) -> int | None:
    return next((number for number, one in enumerate(seen, start=1) if wanted(one)), None)


def _totals(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _by_task(profiles: Iterable[Profile], habit: str) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}
    for p in profiles:
        if p.gold is not None or habit not in _NEEDS_GOLD:
            rows.setdefault(p.trajectory[2], []).append(float(HABITS[habit](p)))
    return rows


def _share(profiles: Sequence[Profile], habit: str) -> dict[str, float] | None:
    rows = _by_task(profiles, habit)
    if not rows:
        return None
    found = pass_at_1(rows)
    return {"mean": found.mean, "low": found.low, "high": found.high}
