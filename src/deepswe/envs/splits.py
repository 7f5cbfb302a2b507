"""Whether the splits that are asked for have tasks; found out before tasks are made, where the recipe alone tells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol, TypeVar

from deepswe.config import MicroTasks, Recipe
from deepswe.envs.base import HasId
from deepswe.errors import ConfigError
from deepswe.tasks.synth.micro.generate import count_by_split

SPLITS = ("train", "heldout", "unseen", "test")
"""The names that makers of tasks give to splits."""


AnyTask = TypeVar("AnyTask", bound=HasId, covariant=True)


class HasSplits(Protocol[AnyTask]):
    """A suite, for all that its splits tell."""

    def split(self, name: str) -> Sequence[AnyTask]:
        """The tasks of a split; empty if there is none of that name."""
        ...


def tasks_of_split(suite: HasSplits[AnyTask], split: str) -> tuple[AnyTask, ...]:
    """The tasks of the split that a command was given.

    Raises:
        ConfigError: there are none; it names the splits that there are.
    """
    tasks = tuple(suite.split(split))
    if not tasks:
        raise _no_tasks(split, _splits_of(suite))
    return tasks


def check_split(recipe: Recipe, split: str) -> None:
    """The same, before tasks are made; where only the tasks can tell, nothing is checked."""
    if isinstance(recipe.tasks, MicroTasks):
        there = _splits_of_micro(recipe.tasks)
        if split not in there:
            raise _no_tasks(split, there)


def check_evaluated(suite: HasSplits[HasId], splits: Sequence[str]) -> None:
    """Refuse `evaluation.splits` of which one has no tasks.

    Raises:
        ConfigError: it names the splits that there are.
    """
    if not all(suite.split(name) for name in splits):
        _check_evaluated(splits, [name for name in dict.fromkeys((*SPLITS, *splits)) if suite.split(name)])


def check_recipe(recipe: Recipe) -> None:
    """The same, before tasks are made; where only the tasks can tell, nothing is checked."""
    if isinstance(recipe.tasks, MicroTasks):
        _check_evaluated(recipe.evaluation.splits, _splits_of_micro(recipe.tasks))


def _splits_of(suite: HasSplits[HasId]) -> list[str]:
    return [name for name in SPLITS if suite.split(name)]


def _splits_of_micro(tasks: MicroTasks) -> list[str]:
    return [name for name, count in count_by_split(tasks).items() if count]


def _no_tasks(split: str, there: Sequence[str]) -> ConfigError:
    ways = f"give --split {there[-1]}" if there else "make some first"
    return ConfigError(f"the task set has no tasks of the split {split!r}; it has {_listed(there)}; {ways}")


def _check_evaluated(splits: Sequence[str], there: Sequence[str]) -> None:
    missing = [name for name in splits if name not in there]
    if not missing:
        return
    kept = [name for name in splits if name in there] or list(there[-1:])
    ways = f"set evaluation.splits={json.dumps(kept)}" if kept else "make some first"
    raise ConfigError(
        f"evaluation.splits names {missing[0]!r}, of which this task set has no tasks; it has {_listed(there)}; {ways}"
    )


def _listed(there: Sequence[str]) -> str:
    return ", ".join(there) or "none at all"
