"""A run as the page wants it: a light index of all attempts, and the attempts themselves in chunks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepswe.algorithms.filters import turns
from deepswe.analysis.behaviour import Action, Seen, classify, thought_of
from deepswe.analysis.harmless import clip, harmless
from deepswe.analysis.samples import phase_order
from deepswe.analysis.viewer.training import Trained, trained_parts
from deepswe.config import AlgorithmConfig
from deepswe.rollout.store import TrajectoryStore
from deepswe.types import Graded, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""
Ratios = Callable[[Trajectory], Sequence[Sequence[float]]]
"""For each span of an attempt the ratio of each of its tokens; empty for spans that are not sampled."""

CHUNK_CHARACTERS = 400_000
"""Of JSON before compression: what one click waits for."""
LONGEST_TEXT = 2_000_000
"""Characters of one text that are kept."""
ACTIONS = tuple(action.value for action in Action)
COLUMNS = (
    "phase", "step", "task", "attempt", "ending", "reward", "turns", "tokens", "sampled", "seconds", "classes", "signs",
    "chunk",
)  # fmt: skip


@dataclass(slots=True)
class Book:
    """What the page is made of.

    Attributes:
        columns: name -> value of each attempt, in the order of the store; "task" is a place in `tasks`, "classes" one
            letter a turn ("a" is the first of `ACTIONS`).
        tasks: of each task its id, repository, kind, and the chunk with its issue and gold patch.
        chunks: compressed (zlib) JSON: a list of attempts, or of [issue, gold patch] of tasks.
    """

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    tasks: list[list[Any]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)


def read_book(
    store: TrajectoryStore,
    *,
    algorithm: AlgorithmConfig | None,
    decode: Decode | None,
    gold: Mapping[str, str],
    issues: Mapping[str, str],
    tokens: bool = True,
    ratios: Ratios | None = None,
) -> Book:
    """Read all committed attempts of a run, one batch in memory at a time.

    Args:
        algorithm: for the advantages; None leaves them out.
        decode: token ids to text; None shows ids.
        gold, issues: task id -> gold patch and issue, where known; otherwise an attempt's own tag or opening.
        tokens: keep the token streams.
        ratios: gives the ratio of each sampled token.

    Raises:
        StoreError: a record is damaged.
    """
    writer = _Writer(decode, gold, issues, tokens, ratios)
    for phase, step in sorted(store.segments(), key=lambda segment: (phase_order(segment[0]), segment)):
        batch = store.committed(phase, step) or ()
        parts = trained_parts(batch, algorithm)
        for trajectory in batch:
            writer.add(trajectory, parts.get(trajectory.key))
    return writer.finish()


class _Writer:
    """Fills a book."""

    def __init__(
        self,
        decode: Decode | None,
        gold: Mapping[str, str],
        issues: Mapping[str, str],
        tokens: bool,
        ratios: Ratios | None,
    ) -> None:
        self._decode, self._gold, self._issues, self._tokens, self._ratios = decode, gold, issues, tokens, ratios
        self._book = Book()
        self._places: dict[str, int] = {}
        self._texts: list[str] = []
        self._pending: list[str] = []
        self._size = 0
        self._names: dict[int, str] = {}

    def add(self, trajectory: Trajectory, part: Trained | None) -> None:
        """One more attempt."""
        seen = classify(trajectory.steps)
        opening = self._opening(trajectory)
        place = self._place(trajectory, opening)
        text = _json(self._detail(trajectory, seen, part, opening))
        if self._pending and self._size + len(text) > CHUNK_CHARACTERS:
            self._close()
        self._pending.append(text)
        self._size += len(text)
        row = (
            harmless(trajectory.phase),
            trajectory.step,
            place,
            trajectory.attempt,
            trajectory.ending.value,
            trajectory.reward,
            len(trajectory.steps),
            trajectory.length,
            trajectory.sampled_length,
            round(trajectory.wall_s, 2),
            "".join(chr(97 + ACTIONS.index(one.action)) for one in seen),
            harmless(trajectory.tags.get("canary", "")),
            [len(self._book.chunks), len(self._pending) - 1],
        )
        for name, value in zip(COLUMNS, row, strict=True):
            self._book.columns[name].append(value)

    def finish(self) -> Book:
        """The book, with the texts of the tasks as its last chunks."""
        self._close()
        book, first, held = self._book, 0, 0
        for number, text in enumerate(self._texts):
            held += len(text)
            if held > CHUNK_CHARACTERS or number == len(self._texts) - 1:
                for place in range(first, number + 1):
                    book.tasks[place].append([len(book.chunks), place - first])
                book.chunks.append(_pack(self._texts[first : number + 1]))
                first, held = number + 1, 0
        return book

    def _close(self) -> None:
        if self._pending:
            self._book.chunks.append(_pack(self._pending))
            self._pending, self._size = [], 0

    def _place(self, trajectory: Trajectory, opening: str) -> int:
        name = trajectory.task_id
        if name not in self._places:
            self._places[name] = len(self._book.tasks)
            tags = trajectory.tags
            self._book.tasks.append([harmless(text) for text in (name, tags.get("repo", ""), tags.get("kind", ""))])
            issue = self._issues.get(name) or tags.get("issue") or opening
            self._texts.append(_json([_text(issue), _text(self._gold.get(name, ""))]))
        return self._places[name]

    def _opening(self, trajectory: Trajectory) -> str:
        first = trajectory.spans[0] if trajectory.spans else None
        if self._decode is None or first is None or first.sampled:
            return ""
        return self._decode(first.tokens)

    def _detail(self, t: Trajectory, seen: Sequence[Seen], part: Trained | None, opening: str) -> dict[str, Any]:
        statuses = t.grade.statuses if isinstance(t.grade, Graded) else {}
        detail: dict[str, Any] = {
            "turns": [
                {
                    "thought": _text(thought_of(step.completion)) if step.call is not None else "",
                    "said": "" if step.call is not None else _text(step.completion),
                    "tool": None if step.call is None else harmless(step.call.name),
                    "arguments": [] if step.call is None else _pairs(step.call.arguments),
                    "answer": _text(step.observation),
                    "error": harmless(step.error),
                    "seconds": [round(step.generation_s, 3), round(step.environment_s, 3)],
                    "rule": one.rule,
                    "evidence": harmless(one.evidence),
                }
                for step, one in zip(t.steps, seen, strict=True)
            ],
            "opening": _text(opening),
            "diff": _text(t.artifact),
            "reason": _text(t.grade.reason if isinstance(t.grade, Graded) else t.grade.error),
            "error": _text(t.error),
            "tests": sorted(_pairs(statuses), key=lambda pair: (pair[1] == "passed", pair[0])),
            "tags": _pairs({key: value for key, value in t.tags.items() if key != "issue"}),
            "seed": str(t.seed),
            "retries": t.retries,
            "role": part.role if part else "",
            "advantages": [round(value, 5) for value in part.advantages] if part else [],
        }
        if self._tokens:
            detail |= self._streams(t)
        return detail

    def _streams(self, t: Trajectory) -> dict[str, Any]:
        numbers = turns(t.spans)
        ratios = self._ratios(t) if self._ratios else ()
        spans = [
            [
                int(span.sampled),
                span.version,
                number,
                list(span.tokens),
                [round(value, 4) for value in span.logprobs],
                [round(value, 4) for value in ratios[place]] if ratios else [],
            ]
            for place, (span, number) in enumerate(zip(t.spans, numbers, strict=True))
        ]
        used = sorted({token for span in t.spans for token in span.tokens})
        return {"spans": spans, "starts": list(t.starts), "names": [[token, self._name(token)] for token in used]}

    def _name(self, token: int) -> str:
        if token not in self._names:
            self._names[token] = harmless(self._decode([token])) if self._decode else ""
        return self._names[token]


def pack_index(book: Book) -> bytes:
    """The index, compressed."""
    return zlib.compress(_json({"columns": book.columns, "tasks": book.tasks, "actions": ACTIONS}).encode("ascii"), 6)


def _pack(texts: Sequence[str]) -> bytes:
    return zlib.compress(f"[{','.join(texts)}]".encode("ascii"), 6)


def _pairs(values: Mapping[str, str]) -> list[list[str]]:
    return [[_text(name), _text(value)] for name, value in values.items()]


def _text(text: str) -> str:
    return harmless(clip(text, characters=LONGEST_TEXT, line=LONGEST_TEXT))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
