"""One trajectory as bytes: as a line of JSON for people and other programs, and packed for the store.

A packed record is a line of JSON with the texts, and after it the numbers as they lie in memory, little-endian: the
lower two bytes of the token ids of all spans, the upper two bytes of each unless all are zero, and the log-probs of all
sampled spans (four bytes each where that is exact, as it is for what engines compute in float32, else eight).
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from dataclasses import asdict, fields, replace
from itertools import chain, product
from typing import Any, Literal

from deepswe.errors import StoreError
from deepswe.shapes import misfit
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory, Ungraded, Usage

_DAMAGES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
_PLAIN = tuple(item.name for item in fields(Trajectory) if item.name not in ("spans", "steps", "grade", "usage"))
_LOWER, _UPPER = (0, 1) if sys.byteorder == "little" else (1, 0)
_STEP_TYPES = frozenset(product((str,), (list, type(None)), (str,), (str,), (float, int), (float, int)))
Precision = Literal["f", "d"]


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
        trajectory = _trajectory(record)
        wrong = misfit(trajectory, Trajectory) or _no_number(trajectory)
    except _DAMAGES as error:
        raise StoreError(f"not a trajectory record ({error}); the line begins {line[:80]!r}") from error
    if wrong:
        raise StoreError(f"not a trajectory record ({wrong}); the line begins {line[:80]!r}")
    return trajectory


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """The packed record, not compressed.

    Raises:
        StoreError: a token id is not in 0 to 2^32 - 1.
    """
    precision, logprobs = _narrowest(list(chain.from_iterable(span.logprobs for span in trajectory.spans)))
    try:
        tokens = array("I", list(chain.from_iterable(span.tokens for span in trajectory.spans)))
    except (OverflowError, TypeError) as error:
        raise StoreError(f"a token id of {trajectory.key} cannot be recorded: {error}") from error
    halves = memoryview(tokens).cast("B").cast("H")
    lower, upper = array("H", halves[_LOWER::2].tobytes()), array("H", halves[_UPPER::2].tobytes())
    wide = any(upper)
    record: dict[str, Any] = {name: getattr(trajectory, name) for name in _PLAIN}
    record["grade"] = _row(trajectory.grade)
    record["spans"] = [(len(span.tokens), span.sampled, span.version) for span in trajectory.spans]
    record["steps"] = [_pack_step(step) for step in trajectory.steps]
    record["usage"] = [list(_row(turn).values()) for turn in trajectory.usage]
    record |= {"wide": wide, "precision": precision}
    line = json.dumps(record, separators=(",", ":")).encode("ascii")
    return b"".join((line, b"\n", _little(lower), _little(upper) if wide else b"", _little(logprobs)))


def unpack_trajectory(record: bytes) -> Trajectory:
    """The inverse of `pack_trajectory`.

    Raises:
        StoreError: these bytes are no packed trajectory.
    """
    try:
        end = record.index(b"\n")
        head = json.loads(record[:end])
        spans = _unpack_spans(head.pop("spans"), head.pop("wide"), head.pop("precision"), record[end + 1 :])
        steps = tuple(_unpack_step(row) for row in head["steps"])
        head["usage"] = tuple(Usage(*row) for row in head["usage"])
        rest = _trajectory({**head, "spans": (), "steps": ()})
        wrong = misfit(rest, Trajectory) or _no_number(rest)
        trajectory = replace(rest, spans=spans, steps=steps)
    except _DAMAGES as error:
        raise StoreError(f"not a packed trajectory ({error}); it begins {record[:80]!r}") from error
    if wrong:
        raise StoreError(f"not a packed trajectory ({wrong}); it begins {record[:80]!r}")
    return trajectory


def _trajectory(record: dict[str, Any]) -> Trajectory:
    record["grade"] = (Graded if record["grade"]["kind"] == "graded" else Ungraded)(**record["grade"])
    record["ending"] = Ending(record["ending"])
    record["starts"] = tuple(record.get("starts", ()))
    return Trajectory(**record)


def _no_number(trajectory: Trajectory) -> str:
    grade = trajectory.grade
    if isinstance(grade, Graded) and not math.isfinite(grade.reward):
        return f"grade.reward is {grade.reward}, not a number"
    return ""


def _load_span(record: dict[str, Any]) -> TokenSpan:
    return TokenSpan(tuple(record["tokens"]), record["sampled"], tuple(record["logprobs"]), record["version"])


def _load_step(record: dict[str, Any]) -> Step:
    call = record.pop("call")
    return Step(call=call and ToolCall(**call), **record)


def _row(item: Graded | Ungraded | Usage) -> dict[str, Any]:
    """Field -> value; `asdict` would copy what it holds."""
    return {one.name: getattr(item, one.name) for one in fields(item)}


def _pack_step(step: Step) -> tuple[Any, ...]:
    call = step.call and (step.call.name, step.call.arguments)
    return (step.completion, call, step.observation, step.error, step.generation_s, step.environment_s)


def _unpack_step(row: list[Any]) -> Step:
    if tuple(map(type, row)) not in _STEP_TYPES:  # one look: there are many steps
        raise TypeError(f"a step is {str(row)[:80]}")
    completion, call, *rest = row
    return Step(completion, call and _unpack_call(*call), *rest)


def _unpack_call(name: Any, arguments: Any) -> ToolCall:
    if type(name) is not str or not isinstance(arguments, dict) or not set(map(type, arguments.values())) <= {str}:
        raise TypeError(f"a call is {name!r}, {str(arguments)[:80]}")
    return ToolCall(name, arguments)


def _unpack_spans(rows: list[Any], wide: bool, precision: Any, numbers: bytes) -> tuple[TokenSpan, ...]:
    if precision not in ("f", "d"):
        raise ValueError(f"precision is {precision!r}")
    count = sum(length for length, _, _ in rows)
    end = 2 * count
    lower = _from_little("H", numbers[:end])
    if wide:
        lower, end = _widen(lower, _from_little("H", numbers[end : 2 * end])), 2 * end
    tokens, logprobs = tuple(lower), tuple(_from_little(precision, numbers[end:]))
    if len(tokens) != count or len(logprobs) != sum(length for length, sampled, _ in rows if sampled):
        raise ValueError(f"{len(tokens)} token ids and {len(logprobs)} log-probs for {count} tokens")
    spans, at, sampled_at = [], 0, 0
    for length, sampled, version in rows:
        if type(sampled) is not bool or type(version) is not int:
            raise TypeError(f"a span is {sampled!r}, {version!r}")
        own = logprobs[sampled_at : sampled_at + length] if sampled else ()
        spans.append(TokenSpan(tokens[at : at + length], sampled, own, version))
        at, sampled_at = at + length, sampled_at + len(own)
    return tuple(spans)


def _widen(lower: array[Any], upper: array[Any]) -> array[Any]:
    whole = array("I", bytes(4 * len(lower)))
    halves = memoryview(whole).cast("B").cast("H")
    halves[_LOWER::2], halves[_UPPER::2] = memoryview(lower), memoryview(upper)
    return whole


def _narrowest(values: list[float]) -> tuple[Precision, array[float]]:
    """As float32 where that loses nothing."""
    narrow = array("f", values)
    return ("f", narrow) if narrow.tolist() == values else ("d", array("d", values))


def _little(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _from_little(kind: Literal["H"] | Precision, data: bytes) -> array[Any]:
    numbers: array[Any] = array(kind)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
