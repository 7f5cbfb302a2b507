"""A split without tasks is refused with the names of those that have some, before tasks are made where that can be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from deepswe.config import Recipe
from deepswe.envs.base import Environment, Suite
from deepswe.envs.splits import check_evaluated, check_recipe, check_split, tasks_of_split
from deepswe.errors import ConfigError


class Mine(Suite):
    """Tasks of training alone."""

    def split(self, name: str) -> Sequence[Any]:
        return ("a", "b") if name == "train" else ()

    def open(self, task: Any, *, seed: int) -> Environment:
        raise NotImplementedError


def recipe(**tasks: Any) -> Recipe:
    splits = {"splits": ["heldout", "unseen"]}
    return Recipe.model_validate({"run": {"name": "a"}, "tasks": {"kind": "micro", **tasks}, "evaluation": splits})


def test_a_set_without_the_split_names_the_splits_that_it_has_and_the_setting() -> None:
    with pytest.raises(ConfigError, match=re.escape('it has train; set evaluation.splits=["train"]')):
        check_evaluated(Mine(), ("heldout",))
    check_evaluated(Mine(), ("train",))
    with pytest.raises(ConfigError, match="it has train; give --split train"):
        tasks_of_split(Mine(), "heldout")
    assert tasks_of_split(Mine(), "train") == ("a", "b")


def test_numbers_that_leave_a_split_empty_are_refused_before_a_task_is_made() -> None:
    wanted = "evaluation.splits names 'unseen', of which this task set has no tasks; it has train, heldout; set "
    with pytest.raises(ConfigError, match=re.escape(wanted + 'evaluation.splits=["heldout"]')):
        check_recipe(recipe(unseen=0))
    check_recipe(recipe())
    with pytest.raises(ConfigError, match="it has train, unseen; give --split unseen"):
        check_split(recipe(heldout=0), "heldout")
    check_split(recipe(unseen=0), "heldout")
