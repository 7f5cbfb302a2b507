"""What a smaller budget would have made of recorded attempts (DeepSWE's figure 9).

An agent that is not told its limits does the same until one of them ends it. So an attempt that ended by itself within
a smaller limit is what it would have been; of one that a smaller limit cuts, the work up to the cut is known, and only
its grade is missing: its turns are played again in a fresh sandbox, without a model. What lies beyond the recorded
limits, or was told its limit, has to be made anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from deepswe.evaluation.metrics import Estimate
from deepswe.types import Ending, Trajectory

Knob = Literal["steps", "tokens"]


@dataclass(frozen=True, slots=True)
class Cut:
    """What becomes of an attempt under another limit.

    Attributes:
        kind: "kept" as it is, "cut" after `turns` turns were carried out, or "rerun": unknown without the model.
        turns: that were carried out.
    """

    kind: Literal["kept", "cut", "rerun"]
    turns: int = 0


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The score under one limit.

    Attributes:
        knob, value: which.
        estimate: pass@1 with its interval by task.
        kept, replayed, rerun: attempts by how their outcome was found.
        diverged: replayed attempts in which some observation was not the recorded one.
    """

    knob: Knob
    value: int
    estimate: Estimate
    kept: int
    replayed: int
    rerun: int
    diverged: int


def cut(trajectory: Trajectory, knob: Knob, value: int, *, recorded: int, told: bool) -> Cut:
    """What the attempt would have been under another limit.

    Args:
        trajectory: recorded.
        knob, value: the other limit.
        recorded: the limit under which it was made.
        told: the agent was told the steps that remain, so that it may act otherwise under another limit of steps.
    """
    if value == recorded:
        return Cut("kept")
    if told and knob == "steps":
        return Cut("rerun")
    ended_by = Ending.MAX_STEPS if knob == "steps" else Ending.MAX_CONTEXT
    if value > recorded:
        return Cut("rerun" if trajectory.ending is ended_by else "kept")
    if trajectory.ending is Ending.ERROR:
        return Cut("kept")
    if knob == "steps":
        return Cut("kept") if len(trajectory.steps) <= value else Cut("cut", value)
    for number, (before, sampled) in enumerate(turn_lengths(trajectory)):
        if before + sampled > value:
            return Cut("cut", number)
    return Cut("kept")


def turn_lengths(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    """Of each turn the tokens before it, and those sampled in it; by the endpoint's counts where there was one."""
    if trajectory.usage:
        yield from ((turn.prompt, turn.completion) for turn in trajectory.usage)
        return
    for sequence in trajectory.sequences:
        before = 0
        for sampled, spans in groupby(sequence, lambda span: span.sampled):
            length = sum(len(span.tokens) for span in spans)
            if sampled:
                yield before, length
            before += length
