"""One trajectory as bytes for the store: a line of JSON, texts, and columns of numbers.

A packed record, of format 2, is

- a line of JSON with what is short, the kinds of steps that there are (tool or None, error, names of arguments), how
  much follows, and the codes that `struct` has for the token ids (H or, where one needs more than two bytes, I) and
  the log-probs (f where that is exact, as it is for what engines compute in float32, else d);
- the completions of all steps, their observations, and the arguments of their calls, as UTF-8;
- columns, little-endian: seconds of generation and environment; kind of each step; characters of each text; tokens and
  version of each span; whether it is sampled;
- the token ids of all spans, and the log-probs of those that are sampled.

So whatever is long is neither escaped nor parsed, and a number cannot be of a wrong type. Records of format 1 are read.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

from deepswe.errors import StoreError
from deepswe.rollout import packed_1
from deepswe.rollout.record import DAMAGES, assemble, first_misfit
from deepswe.types import Graded, Step, TokenSpan, ToolCall, Trajectory, Ungraded, Usage

FORMAT = 2
_ABOUT_PARTS = frozenset({"format", "kinds", "counts", "codes", "spans", "steps"})
"""Keys of the line of JSON, of either format, that say how to read spans and steps."""
_CODES = ("Hf", "Hd", "If", "Id")
_PLAIN = tuple(item.name for item in fields(Trajectory) if item.name not in ("spans", "steps", "grade", "usage"))

Whole = TypeVar("Whole", str, tuple[Any, ...])


def pack_trajectory(trajectory: Trajectory) -> tuple[bytes, ...]:
    """The packed record, not compressed, in parts: each of them is alike in itself.

    Raises:
        StoreError: a token id or a version is not in 0 to 2^32 - 1.
    """
    steps, spans = trajectory.steps, trajectory.spans
    kinds, chosen, texts = _texts(steps)
    text = "".join(texts).encode("utf-8", "surrogatepass")
    ids = list(chain.from_iterable(span.tokens for span in spans))
    logprobs = list(chain.from_iterable(span.logprobs for span in spans))
    codes = ("H" if max(ids, default=0) < 1 << 16 else "I") + ("f" if _is_float32(logprobs) else "d")
    numbers = (
        *(step.generation_s for step in steps),
        *(step.environment_s for step in steps),
        *chosen,
        *map(len, texts),
        *(len(span.tokens) for span in spans),
        *(span.version for span in spans),
        *(span.sampled for span in spans),
    )
    record: dict[str, Any] = {"format": FORMAT} | {name: getattr(trajectory, name) for name in _PLAIN}
    record |= {"grade": _row(trajectory.grade), "usage": [list(_row(turn).values()) for turn in trajectory.usage]}
    record |= {"kinds": kinds, "counts": [len(steps), len(texts), len(text), len(spans)], "codes": codes}
    line = json.dumps(record, separators=(",", ":")).encode("ascii")
    try:
        columns = struct.pack(_columns(len(steps), len(texts), len(spans)), *numbers)
        packed_ids = struct.pack(f"<{len(ids)}{codes[0]}", *ids)
    except struct.error as error:
        raise StoreError(f"a token id or a version of {trajectory.key} cannot be recorded: {error}") from error
    return b"".join((line, b"\n", text)), columns + packed_ids, struct.pack(f"<{len(logprobs)}{codes[1]}", *logprobs)


def unpack_trajectory(record: bytes) -> Trajectory:
    """The inverse of `pack_trajectory`, whose parts are joined.

    Raises:
        StoreError: these bytes are no packed trajectory.
    """
    with _read(record):
        end = record.index(b"\n")
        head = json.loads(record[:end])
        kind = head.pop("format", 1)
        if kind == FORMAT:
            spans, steps = _unpack(head.pop("kinds"), head.pop("counts"), head.pop("codes"), record, end + 1)
        elif kind == 1:
            spans, steps = packed_1.unpack(head.pop("spans"), head.pop("steps"), record, end + 1)
        else:
            raise ValueError(f"its format is {kind!r}, and this version reads formats up to {FORMAT}")
        return replace(_rest(head), spans=spans, steps=steps)


def unpack_head(record: bytes) -> Trajectory:
    """The same without its spans and steps, which cost most to read: what it was, how it ended and its worth.

    Raises:
        StoreError: these bytes are no packed trajectory.
    """
    with _read(record):
        head = json.loads(record[: record.index(b"\n")])
        return _rest({name: value for name, value in head.items() if name not in _ABOUT_PARTS})


@contextmanager
def _read(record: bytes) -> Iterator[None]:
    """Whatever fails inside is said of the record."""
    try:
        yield
    except (*DAMAGES, struct.error) as error:
        raise StoreError(f"not a packed trajectory ({error}); it begins {record[:80]!r}") from error


def _rest(head: Mapping[str, Any]) -> Trajectory:
    """What the line of JSON says, but for what it says about spans and steps."""
    usage = tuple(Usage(*row) for row in head["usage"])
    trajectory = assemble({**head, "usage": usage, "spans": (), "steps": ()})
    if wrong := first_misfit(trajectory):
        raise ValueError(wrong)
    return trajectory


def _texts(steps: Sequence[Step]) -> tuple[list[tuple[str | None, ...]], list[int], list[str]]:
    """The kinds of steps that there are, the kind of each step, and all texts."""
    kinds: dict[tuple[str | None, ...], int] = {}
    chosen: list[int] = []
    values: list[str] = []
    for step in steps:
        tool, arguments = (step.call.name, step.call.arguments) if step.call else (None, {})
        chosen.append(kinds.setdefault((tool, step.error, *arguments), len(kinds)))
        values += arguments.values()
    texts = [*(step.completion for step in steps), *(step.observation for step in steps), *values]
    return list(kinds), chosen, texts


def _unpack(
    kinds: list[list[Any]], counts: list[int], codes: str, record: bytes, at: int
) -> tuple[tuple[TokenSpan, ...], tuple[Step, ...]]:
    """Spans and steps out of what follows the line of JSON."""
    step_count, text_count, text_bytes, span_count = counts
    if set(map(type, counts)) != {int} or min(counts) < 0 or codes not in _CODES:
        raise ValueError(f"the counts are {counts} and the codes {codes}")
    text = record[at : at + text_bytes].decode("utf-8", "surrogatepass")
    at += text_bytes
    columns = _columns(step_count, text_count, span_count)
    numbers = struct.unpack_from(columns, record, at)
    at += struct.calcsize(columns)
    widths = (*(step_count,) * 3, text_count, *(span_count,) * 3)
    generations, environments, chosen, characters, lengths, versions, sampled = _cut(numbers, widths)
    drawn = [length if own else 0 for length, own in zip(lengths, sampled, strict=True)]
    ids, logprobs = f"<{sum(lengths)}{codes[0]}", f"<{sum(drawn)}{codes[1]}"
    if sum(characters) != len(text) or len(record) - at != struct.calcsize(ids) + struct.calcsize(logprobs):
        raise ValueError(f"{len(text)} characters and {len(record) - at} bytes of numbers for {ids} and {logprobs}")
    parts = _cut(struct.unpack_from(ids, record, at), lengths)
    own_parts = _cut(struct.unpack_from(logprobs, record, at + struct.calcsize(ids)), drawn)
    steps = _steps(kinds, chosen, _cut(text, characters), generations, environments)
    return tuple(map(TokenSpan, parts, sampled, own_parts, versions)), steps


def _steps(
    kinds: Sequence[Sequence[Any]],
    chosen: Sequence[int],
    texts: Sequence[str],
    generations: Sequence[float],
    environments: Sequence[float],
) -> tuple[Step, ...]:
    """The steps, each of one of the kinds."""
    for tool, error, *names in kinds:
        if set(map(type, (error, *names))) != {str} or not isinstance(tool, str | None) or (tool is None and names):
            raise TypeError(f"a kind of step is {[tool, error, *names]}")
    count, split = len(chosen), [(tool, names) for tool, _, *names in kinds]
    values, calls = iter(texts[2 * count :]), []
    if len(texts) != 2 * count + sum(len(split[kind][1]) for kind in chosen):
        raise ValueError(f"{len(texts)} texts for {count} steps")
    for kind in chosen:
        tool, names = split[kind]
        calls.append(None if tool is None else ToolCall(tool, {name: next(values) for name in names}))
    errors = [kinds[kind][1] for kind in chosen]
    return tuple(map(Step, texts[:count], calls, texts[count : 2 * count], errors, generations, environments))


def _cut(whole: Whole, sizes: Iterable[int]) -> list[Whole]:
    """Parts of these sizes, one after the other."""
    return [whole[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


def _columns(steps: int, texts: int, spans: int) -> str:
    """All columns as `struct` has them."""
    return f"<{2 * steps}d{steps + texts + 2 * spans}I{spans}?"


def _row(item: Graded | Ungraded | Usage) -> dict[str, Any]:
    """Field -> value; `asdict` would copy what it holds."""
    return {one.name: getattr(item, one.name) for one in fields(item)}


def _is_float32(values: list[float]) -> bool:
    return array("f", values).tolist() == values
