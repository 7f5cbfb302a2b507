"""One candidate for each task, chosen by scores alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from deepswe.scaling.candidates import Candidate, by_task
from deepswe.scaling.scores import ScoreBook
from deepswe.scaling.select import Scores, select


@dataclass(frozen=True, slots=True)
class Choice:
    """What is submitted for one task.

    Attributes:
        candidate: the one.
        tied: names of all that the method could not tell apart, the chosen one included.
        of: how many candidates there were.
        scored: how many of them have any score.
    """

    candidate: Candidate
    tied: tuple[str, ...]
    of: int
    scored: int


def rank(candidates: Iterable[Candidate], book: ScoreBook, method: str) -> tuple[Choice, ...]:
    """Choose for each task.

    Among candidates that the method cannot tell apart goes the patch that most of them share, then the shortest one
    that is not empty, then the smallest key and name: nothing depends on the order of files or records.

    Args:
        candidates: of any tasks.
        book: their scores.
        method: one of `deepswe.scaling.select.SELECTORS`.

    Raises:
        ConfigError: there is no such method.
    """
    return tuple(_choose(group, book, method) for group in by_task(candidates).values())


def _choose(group: tuple[Candidate, ...], book: ScoreBook, method: str) -> Choice:
    scores = book.scores(group)
    patches = {candidate.name: candidate.patch for candidate in group}
    tied = select(method, scores)
    shared = Counter(s.patch for s in tied)

    def preference(s: Scores) -> tuple[bool, int, int, str, str]:
        patch = patches[s.candidate]
        return (not patch.strip(), -shared[s.patch], len(patch), s.patch, s.candidate)

    first = min(tied, key=preference)
    return Choice(
        next(candidate for candidate in group if candidate.name == first.candidate),
        tuple(sorted(s.candidate for s in tied)),
        len(group),
        sum(not (s.verifier is None and s.regression is None and s.reproduction is None) for s in scores),
    )
