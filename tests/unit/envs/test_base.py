from collections.abc import Sequence
from typing import Any

from deepswe.envs.base import Environment, Suite
from deepswe.envs.custom import METHODS


class Bare(Suite):
    def split(self, name: str) -> Sequence[Any]:
        return ("one",)

    def open(self, task: Any, *, seed: int) -> Environment:
        return (task, seed)  # type: ignore[return-value]


def test_a_suite_that_inherits_needs_only_its_tasks_and_their_environments():
    bare = Bare()
    assert all(callable(getattr(bare, name)) for name in METHODS)
    assert bare.rehearse("one", seed=3) == ("one", 3)
    assert (list(bare.corpus()), bare.reference("one", seed=0), bare.tools(), bare.describe("one")) == (
        [],
        None,
        (),
        {},
    )
