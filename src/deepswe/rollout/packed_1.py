"""Packed records of format 1, which earlier versions wrote: read, never written.

What follows their line of JSON: the texts of the turns as UTF-8, one after the other; then, little-endian, the lower
two bytes of the token ids of all spans, the upper two bytes of each unless all are zero, and the log-probs of all
sampled spans (four or eight bytes each). The line has the columns of steps and spans, with all sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate, chain, pairwise
from struct import unpack_from
from typing import Any

from deepswe.types import Step, TokenSpan, ToolCall


def unpack(
    spans: list[Any], steps: list[Any], record: bytes, at: int
) -> tuple[tuple[TokenSpan, ...], tuple[Step, ...]]:
    """Spans and steps from their columns and from what follows the line of JSON.

    Raises:
        Exception: any of `record.DAMAGES`.
    """
    unpacked, numbers = _unpack_steps(steps, record, at)
    return _unpack_spans(spans, record, numbers), unpacked


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
