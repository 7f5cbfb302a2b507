"""One trajectory as a line of JSON, for people and other programs; and what any record must be to be one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import Any

from deepswe.errors import StoreError
from deepswe.shapes import misfit
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory, Ungraded, Usage

DAMAGES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""What putting a trajectory together out of damaged values raises."""


def dump_trajectory(trajectory: Trajectory) -> bytes:
    """One line of JSON, newline included. Any text survives, lone surrogates as escapes."""
    record = {item.name: getattr(trajectory, item.name) for item in fields(trajectory)}
    record["spans"] = [
        {"tokens": s.tokens, "sampled": s.sampled, "logprobs": s.logprobs, "version": s.version}
        for s in trajectory.spans
    ]
    record["steps"] = [asdict(step) for step in trajectory.steps]
    record["grade"] = asdict(trajectory.grade)
    record["usage"] = [asdict(turn) for turn in trajectory.usage]
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


def load_trajectory(line: bytes | str) -> Trajectory:
    """The inverse of `dump_trajectory`.

    Raises:
        StoreError: the line is no trajectory.
    """
    try:
        record = json.loads(line)
        record["spans"] = tuple(_load_span(span) for span in record["spans"])
        record["steps"] = tuple(_load_step(step) for step in record["steps"])
        record["usage"] = tuple(Usage(**turn) for turn in record.get("usage", ()))
        trajectory = assemble(record)
        wrong = first_misfit(trajectory)
    except DAMAGES as error:
        raise StoreError(f"not a trajectory record ({error}); the line begins {line[:80]!r}") from error
    if wrong:
        raise StoreError(f"not a trajectory record ({wrong}); the line begins {line[:80]!r}")
    return trajectory


def assemble(record: dict[str, Any]) -> Trajectory:
    """The trajectory of a record whose spans, steps and usage are whole already.

    Raises:
        Exception: any of `DAMAGES`.
    """
    record["grade"] = (Graded if record["grade"]["kind"] == "graded" else Ungraded)(**record["grade"])
    record["ending"] = Ending(record["ending"])
    record["starts"] = tuple(record.get("starts", ()))
    return Trajectory(**record)


def first_misfit(trajectory: Trajectory) -> str:
    """Which field has a value that it cannot have; "" where none has."""
    grade = trajectory.grade
    if wrong := misfit(trajectory, Trajectory):
        return wrong
    if isinstance(grade, Graded) and not math.isfinite(grade.reward):
        return f"grade.reward is {grade.reward}, not a number"
    return ""


def _load_span(record: dict[str, Any]) -> TokenSpan:
    return TokenSpan(tuple(record["tokens"]), record["sampled"], tuple(record["logprobs"]), record["version"])


def _load_step(record: dict[str, Any]) -> Step:
    call = record.pop("call")
    return Step(call=call and ToolCall(**call), **record)
