"""One trajectory as bytes: as a line of JSON for people and other programs, and packed for the store.

A packed record is a line of JSON with everything short, column by column; then the texts of the turns as UTF-8, one
after the other; then the numbers as they lie in memory, little-endian: the lower two bytes of the token ids of all
spans, the upper two bytes of each unless all are zero, and the log-probs of all sampled spans (four bytes each where
that is exact, as it is for what engines compute in float32, else eight). So whatever is long is neither escaped nor
parsed, and what is alike lies together.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import accumulate, chain, pairwise
from struct import unpack_from
from typing import Any, Literal

from deepswe.errors import StoreError
from deepswe.shapes import misfit
from deepswe.types import Ending, Graded, Step, TokenSpan, ToolCall, Trajectory, Ungraded, Usage

_DAMAGES = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
_PLAIN = tuple(item.name for item in fields(Trajectory) if item.name not in ("spans", "steps", "grade", "usage"))
_COMPACT = json.JSONEncoder(separators=(",", ":"))
_LOWER, _UPPER = (0, 1) if sys.byteorder == "little" else (1, 0)
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
    try:
        spans, numbers = _pack_spans(trajectory.spans)
    except (OverflowError, TypeError) as error:
        raise StoreError(f"a token id of {trajectory.key} cannot be recorded: {error}") from error
    steps, texts = _pack_steps(trajectory.steps)
    record: dict[str, Any] = {name: getattr(trajectory, name) for name in _PLAIN}
    record |= {"grade": _row(trajectory.grade), "usage": [list(_row(turn).values()) for turn in trajectory.usage]}
    record |= {"spans": spans, "steps": steps}
    line = _COMPACT.encode(record).encode("ascii")
    return b"".join((line, b"\n", *texts, *numbers))


def unpack_trajectory(record: bytes) -> Trajectory:
    """The inverse of `pack_trajectory`.

    Raises:
        StoreError: these bytes are no packed trajectory.
    """
    with _packed(record):
        head, end = _read_head(record)
        rest = _head_only(head)
        steps, numbers = _unpack_steps(head["steps"], record, end + 1)
        return replace(rest, spans=_unpack_spans(head["spans"], record, numbers), steps=steps)


def unpack_head(record: bytes) -> Trajectory:
    """The same without its spans and steps, which cost most to read: what it was, how it ended and its worth.

    Raises:
        StoreError: these bytes are no packed trajectory.
    """
    with _packed(record):
        return _head_only(_read_head(record)[0])


@contextmanager
def _packed(record: bytes) -> Iterator[None]:
    """Whatever fails inside is said of the record."""
    try:
        yield
    except _DAMAGES as error:
        raise StoreError(f"not a packed trajectory ({error}); it begins {record[:80]!r}") from error


def _read_head(record: bytes) -> tuple[dict[str, Any], int]:
    """The short fields, and where they end."""
    end = record.index(b"\n")
    return json.loads(record[:end]), end


def _head_only(head: Mapping[str, Any]) -> Trajectory:
    usage = tuple(Usage(*row) for row in head["usage"])
    trajectory = _trajectory({**head, "usage": usage, "spans": (), "steps": ()})
    if wrong := misfit(trajectory, Trajectory) or _no_number(trajectory):
        raise ValueError(wrong)
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


def _pack_steps(steps: Sequence[Step]) -> tuple[list[Any], list[bytes]]:
    """Columns: completion and observation in bytes, tool or None, names and bytes of its arguments, error, seconds."""
    columns: list[Any] = [[], [], [], [], [], [], [], []]
    texts = []
    for step in steps:
        call, values = step.call, list(step.call.arguments.values()) if step.call else []
        encoded = [text.encode("utf-8", "surrogatepass") for text in (step.completion, step.observation, *values)]
        texts += encoded
        first, second, *sizes = map(len, encoded)
        names = list(call.arguments) if call else []
        row = (first, second, call and call.name, names, sizes, step.error, step.generation_s, step.environment_s)
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return columns, texts


def _unpack_steps(columns: list[Any], record: bytes, at: int) -> tuple[tuple[Step, ...], int]:
    """The steps, and where their texts end in the record."""
    firsts, seconds, tools, names, sizes, errors, generations, environments = columns
    _all_are("a size of a text", {int}, firsts, seconds, *sizes)
    _all_are("a tool", {str, type(None)}, tools)
    _all_are("a name or an error", {str}, errors, *names)
    _all_are("a time", {float, int}, generations, environments)
    lengths = chain.from_iterable((one, two, *own) for one, two, own in zip(firsts, seconds, sizes, strict=True))
    ends = list(accumulate(lengths, initial=at))
    if ends[-1] > len(record) or min((*firsts, *seconds), default=0) < 0:
        raise ValueError("texts are missing")
    texts = (record[start:end].decode("utf-8", "surrogatepass") for start, end in pairwise(ends))
    steps = []
    for tool, own, error, generation_s, environment_s in zip(
        tools, names, errors, generations, environments, strict=True
    ):
        completion, observation = next(texts), next(texts)
        call = None if tool is None else ToolCall(tool, dict(zip(own, texts, strict=False)))
        steps.append(Step(completion, call, observation, error, generation_s, environment_s))
    return tuple(steps), ends[-1]


def _pack_spans(spans: Sequence[TokenSpan]) -> tuple[list[Any], tuple[bytes, ...]]:
    """Columns: tokens, sampled, version; then whether token ids are wide, and the precision of log-probs."""
    precision, logprobs = _narrowest(list(chain.from_iterable(span.logprobs for span in spans)))
    tokens = array("I", list(chain.from_iterable(span.tokens for span in spans)))
    halves = memoryview(tokens).cast("B").cast("H")
    lower, upper = array("H", halves[_LOWER::2].tobytes()), array("H", halves[_UPPER::2].tobytes())
    wide = any(upper)
    counts, sampled = [len(span.tokens) for span in spans], [span.sampled for span in spans]
    numbers = (_little(lower), _little(upper) if wide else b"", _little(logprobs))
    return [counts, sampled, [span.version for span in spans], wide, precision], numbers


def _unpack_spans(columns: list[Any], record: bytes, at: int) -> tuple[TokenSpan, ...]:
    """The spans, whose numbers begin at `at` in the record."""
    counts, sampled, versions, wide, precision = columns
    _all_are("a number of tokens or a version", {int}, counts, versions)
    _all_are("whether a span is sampled", {bool}, sampled, [wide])
    if precision not in ("f", "d"):
        raise ValueError(f"the precision is {precision!r}")
    own = [length if drawn else 0 for length, drawn in zip(counts, sampled, strict=True)]
    count, drawn_count = sum(counts), sum(own)
    end = at + 2 * count * (2 if wide else 1)
    if min(counts, default=0) < 0 or len(record) != end + drawn_count * (4 if precision == "f" else 8):
        raise ValueError(f"{len(record) - at} bytes of numbers for {count} tokens, {drawn_count} of them sampled")
    if wide:
        tokens = _widen(record[at : at + 2 * count], record[at + 2 * count : end])
    else:
        tokens = unpack_from(f"<{count}H", record, at)
    logprobs = unpack_from(f"<{drawn_count}{precision}", record, end)
    places = zip(pairwise(accumulate(counts, initial=0)), pairwise(accumulate(own, initial=0)), strict=True)
    return tuple(
        TokenSpan(tokens[start:end], drawn, logprobs[first:last], version)
        for ((start, end), (first, last)), drawn, version in zip(places, sampled, versions, strict=True)
    )


def _all_are(what: str, kinds: Set[type], *columns: Sequence[Any]) -> None:
    for column in columns:
        if not set(map(type, column)) <= kinds:
            raise TypeError(f"{what} is among {str(column)[:80]}")


def _widen(lower: bytes, upper: bytes) -> tuple[int, ...]:
    """Token ids from the two halves of each, little-endian."""
    whole = bytearray(2 * len(lower))
    whole[0::4], whole[1::4], whole[2::4], whole[3::4] = lower[::2], lower[1::2], upper[::2], upper[1::2]
    return unpack_from(f"<{len(lower) // 2}I", whole)


def _narrowest(values: list[float]) -> tuple[Precision, array[float]]:
    """As float32 where that loses nothing."""
    narrow = array("f", values)
    return ("f", narrow) if narrow.tolist() == values else ("d", array("d", values))


def _little(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers.tobytes()
