"""What an execution-free verifier reads: the issue, the interaction, the patch. Cut to a budget of tokens.

Where all of it does not fit, the longest thoughts are cut first, to a common length; then observations, from the
middle of the interaction outwards; then actions in the same order; then the patch and the issue. Each text is split
into tokens once, so the time is linear in the text. A cut keeps the beginning and the end.

Source: R2E-Gym (Jain et al. 2025), section 4.1, for what the verifier reads and the two answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from deepswe.scaling.candidates import Candidate
from deepswe.tasks.patches import read_diff
from deepswe.types import Message

Style = Literal["full", "brief"]
ANSWERS = ("YES", "NO")
MARK = "[...]"
"""Stands for what was cut."""

_SYSTEM = """You judge the work of a software engineer who was asked to resolve an issue in a repository. You see the \
issue, what the engineer did and what came back, and the patch that was submitted. The tests that decide are hidden \
from you. Answer with one word: YES if the patch resolves the issue without breaking anything else, NO if not."""
_QUESTION = "Does this patch resolve the issue? Answer YES or NO."
_ACTION = re.compile(r"<function=|<tool_call>")


class Tokens(Protocol):
    """Splits a text into tokens and back. `decode(encode(text))` is the text."""

    def encode(self, text: str) -> Sequence[Any]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[Any]) -> str:
        """The text of tokens."""
        ...


class ApproximateTokens:
    """Pieces of at most four letters, for models whose tokenizer is elsewhere; most tokenizers make fewer."""

    def encode(self, text: str) -> Sequence[str]:
        """The pieces."""
        return re.findall(r"\w{1,4}|\s+|[^\w\s]", text)

    def decode(self, tokens: Sequence[str]) -> str:
        """The text of pieces."""
        return "".join(tokens)


@dataclass(frozen=True, slots=True)
class Reading:
    """One candidate as the verifier reads it.

    Attributes:
        issue: of the task.
        turns: what the agent said and what came back, in order.
        patch: that it submitted.
    """

    issue: str
    turns: tuple[Message, ...]
    patch: str


def read_candidate(candidate: Candidate) -> Reading:
    """A candidate's issue, interaction and patch; the patch without its blob hashes, which tell nothing."""
    kept = (sign + text for sign, text in read_diff(candidate.patch) if sign or not text.startswith("index "))
    return Reading(candidate.issue, candidate.turns, "\n".join(kept).strip("\n"))


def messages_of(reading: Reading, style: Style) -> tuple[Message, ...]:
    """The conversation that asks for the answer.

    Args:
        reading: whole or condensed.
        style: "full" says what is asked; "brief" has the texts alone, for a small model that learns the question.
    """
    if style == "brief":
        texts = (reading.issue, "\n".join(turn.content for turn in reading.turns), reading.patch)
        return (Message("user", "\n\n".join(texts)),)
    turns = "\n\n".join(f"[{turn.role}]\n{turn.content}" for turn in reading.turns) or "(not recorded)"
    patch = reading.patch or "(empty: nothing was changed)"
    parts = (("issue", reading.issue), ("interaction", turns), ("patch", patch))
    body = "\n\n".join(f"<{name}>\n{text}\n</{name}>" for name, text in parts)
    return (Message("system", _SYSTEM), Message("user", f"{body}\n\n{_QUESTION}"))


@dataclass(slots=True)
class _Piece:
    """A text with its tokens. `order` says when it is cut; `place` where among its like."""

    tokens: Sequence[Any]
    order: int
    keep: int = 0

    def __post_init__(self) -> None:
        self.keep = len(self.tokens)


def condense(reading: Reading, tokens: Tokens, budget: int) -> Reading:
    """The reading with at most `budget` tokens, where the marks of cuts leave room for that.

    Args:
        reading: of any length.
        tokens: splits texts.
        budget: of all texts together, the frame around them apart.
    """
    issue, patch = _Piece(tokens.encode(reading.issue), 3), _Piece(tokens.encode(reading.patch), 3)
    turns = [list(_pieces_of(turn, tokens)) for turn in reading.turns]
    inner = [piece for pieces in turns for piece in pieces]
    mark = tokens.encode(MARK)
    excess = len(issue.tokens) + len(patch.tokens) + sum(len(piece.tokens) for piece in inner) - budget
    if excess <= 0:
        return reading
    excess = _level([piece for piece in inner if piece.order == 0], len(mark), excess)
    for piece in sorted(_from_middle(inner), key=lambda piece: piece.order):
        excess = _level([piece], len(mark), excess)
    _level([patch, issue], len(mark), excess)

    def text(piece: _Piece) -> str:
        return _cut(piece, mark, tokens)

    short = tuple(
        replace(turn, content="".join(map(text, pieces))) for turn, pieces in zip(reading.turns, turns, strict=True)
    )
    return Reading(text(issue), short, text(patch))


def _pieces_of(turn: Message, tokens: Tokens) -> Iterator[_Piece]:
    """A turn of the agent is a thought (order 0) and an action (2); any other is an observation (1)."""
    if turn.role != "assistant":
        yield _Piece(tokens.encode(turn.content), 1)
        return
    found = _ACTION.search(turn.content)
    start = found.start() if found else len(turn.content)
    yield _Piece(tokens.encode(turn.content[:start]), 0)
    yield _Piece(tokens.encode(turn.content[start:]), 2)


def _from_middle(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Observations and actions, the middle ones first."""
    kept = [piece for piece in pieces if piece.order]
    return [kept[i] for i in sorted(range(len(kept)), key=lambda i: (abs(2 * i - len(kept) + 1), i))]


def _level(pieces: Sequence[_Piece], mark: int, excess: int) -> int:
    """Cut the longest pieces to a common length, at least a mark, that saves `excess`; returns what is left of it."""
    if excess <= 0:
        return excess
    lengths = sorted((piece.keep for piece in pieces if piece.keep > mark), reverse=True)
    saved, cap = 0, mark
    for count, (length, following) in enumerate(zip(lengths, [*lengths[1:], mark], strict=False), start=1):
        drop = (length - following) * count
        if saved + drop >= excess:
            cap = length - -(-(excess - saved) // count)
            break
        saved += drop
    for piece in pieces:
        if piece.keep > cap:
            excess -= piece.keep - cap
            piece.keep = cap
    return excess


def _cut(piece: _Piece, mark: Sequence[Any], tokens: Tokens) -> str:
    whole, keep = piece.tokens, piece.keep - len(mark)
    if piece.keep >= len(whole):
        return tokens.decode(whole)
    head = (keep + 1) // 2
    return tokens.decode(whole[:head]) + MARK + tokens.decode(whole[len(whole) - (keep - head) :])
