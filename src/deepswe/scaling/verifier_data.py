"""The verifier's data set: judged attempts, each with the answer that a grader gave, balanced and split by group.

No group (a repository, or a family of generated tasks) is on both sides of the split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepswe.errors import ConfigError
from deepswe.scaling.candidates import Candidate
from deepswe.types import Ending, Graded, TokenSpan, Trajectory


@dataclass(frozen=True, slots=True)
class Example:
    """A candidate whose answer is known.

    Attributes:
        candidate: what the verifier reads.
        answer: whether it solves its task.
        group: what the split keeps together.
    """

    candidate: Candidate
    answer: bool
    group: str


@dataclass(frozen=True, slots=True)
class DataSet:
    """What a verifier is trained on and measured by.

    Attributes:
        train: as many right as wrong examples, in a fixed order.
        heldout: of other groups, in the shares in which they come.
        prior: share of right ones in the training groups before balancing.
        ungraded: candidates without an outcome, left out.
    """

    train: tuple[Example, ...]
    heldout: tuple[Example, ...]
    prior: float
    ungraded: int


def make_data_set(
    candidates: Iterable[Candidate], *, split_by: str, heldout_share: float, seed: int, most: int = 0
) -> DataSet:
    """Choose examples out of graded candidates.

    Args:
        candidates: of any tasks.
        split_by: "task", or a tag such as "repo"; a candidate without that tag is its task's.
        heldout_share: of the groups, chosen by a hash of their names; groups are whole on one side.
        seed: of the choice among examples, and of the split.
        most: examples of each side; 0 takes all.

    Raises:
        ConfigError: the training side lacks right or wrong examples.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.key)
    examples = [Example(c, c.outcome >= 1.0, group_of(c, split_by)) for c in ordered if c.outcome is not None]
    heldout = [e for e in examples if is_heldout(e.group, heldout_share, seed)]
    train = [e for e in examples if not is_heldout(e.group, heldout_share, seed)]
    right = sum(e.answer for e in train)
    if not 0 < right < len(train):
        raise ConfigError(
            f"{len(train)} judged candidates to train a verifier on, of which {right} are right; it needs both right "
            "and wrong ones: give more runs, or a smaller data.heldout_share"
        )
    if most and len(heldout) > most:
        heldout = random.Random(f"heldout/{seed}").sample(heldout, most)
    return DataSet(balance(train, seed, most), tuple(heldout), right / len(train), len(ordered) - len(examples))


def group_of(candidate: Candidate, split_by: str) -> str:
    """What the split keeps together with this candidate."""
    return candidate.tags.get(split_by, candidate.task_id) if split_by != "task" else candidate.task_id


def is_heldout(group: str, share: float, seed: int) -> bool:
    """Whether a group is held out; a fixed function of its name, so more data moves no group."""
    digest = hashlib.sha256(f"verifier/{seed}/{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def balance(examples: Sequence[Example], seed: int, most: int = 0) -> tuple[Example, ...]:
    """As many right as wrong ones, at most `most` unless that is 0: a seeded choice, spread over tasks, in order."""
    rng = random.Random(f"balance/{seed}")
    sides = {answer: [i for i, e in enumerate(examples) if e.answer is answer] for answer in (True, False)}
    count = min([*map(len, sides.values()), *([max(1, most // 2)] if most else [])])
    kept: set[int] = set()
    for places in sides.values():
        kept.update(_spread(places, examples, count, rng))
    return tuple(example for index, example in enumerate(examples) if index in kept)


def _spread(places: Sequence[int], examples: Sequence[Example], count: int, rng: random.Random) -> list[int]:
    """That many of the places, the tasks in turn."""
    turn: dict[str, int] = {}
    ranked = []
    for place in rng.sample(places, len(places)):
        task = examples[place].candidate.task_id
        turn[task] = turn.get(task, 0) + 1
        ranked.append((turn[task], place))
    ranked.sort(key=lambda pair: pair[0])
    return [place for _, place in ranked[:count]]


def as_trajectory(task_id: str, prompt: Sequence[int], answer: int) -> Trajectory:
    """An example as what the learner takes: the prompt, and one sampled token, which alone is in the loss.

    Args:
        task_id: whose.
        prompt: all tokens before the one that answers.
        answer: the token that does.
    """
    spans = (TokenSpan(tuple(prompt), False), TokenSpan((answer,), True, (0.0,)))
    return Trajectory(task_id, 0, "verifier", 0, spans, (), Ending.SUBMITTED, Graded(1.0))
