"""From a recipe to its suite: tasks built, a sandbox pool open where the tasks need one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deepswe.config import FrozenLakeTasks, Recipe
from deepswe.envs.base import Suite
from deepswe.envs.frozenlake import FrozenLakeSuite
from deepswe.progress import Progress

UNBOUNDED = 1 << 16
"""Attempts in flight where no sandbox limits them."""


@dataclass(frozen=True, slots=True)
class OpenSuite:
    """A suite ready for attempts.

    Attributes:
        suite: the tasks and their environments.
        capacity: attempts that can be in flight at once.
        counters: running counts worth logging, such as test runs.
    """

    suite: Suite
    capacity: int
    counters: Callable[[], Mapping[str, int]] = dict


@asynccontextmanager
async def open_suite(recipe: Recipe, progress: Progress) -> AsyncIterator[OpenSuite]:
    """The recipe's suite for the length of the block.

    Raises:
        DeepsweError: the tasks cannot be built, or this machine cannot run the sandbox backend.
    """
    if isinstance(recipe.tasks, FrozenLakeTasks):
        yield OpenSuite(FrozenLakeSuite(recipe.tasks), UNBOUNDED)
