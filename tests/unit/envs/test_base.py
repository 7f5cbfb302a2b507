from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepswe.envs.base import Environment, Suite, SuiteAround
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


def test_a_suite_around_another_answers_everything_as_that_one_does():
    class Full(Bare):
        def rehearse(self, task: Any, *, seed: int) -> Environment:
            return ("rehearsed", task, seed)  # type: ignore[return-value]

        def corpus(self) -> Iterator[str]:
            return iter(("text",))

        def reference(self, task: Any, *, seed: int) -> Iterator[str] | None:
            return iter(("call",))

        def tools(self) -> Sequence[Mapping[str, Any]]:
            return ({"name": "tool"},)

        def describe(self, task: Any) -> Mapping[str, str]:
            return {"kind": "one"}

    around = SuiteAround(Full())
    assert all(name in SuiteAround.__dict__ for name in METHODS)
    assert (around.split("train"), around.open("one", seed=1)) == (("one",), ("one", 1))
    assert (around.rehearse("one", seed=2), list(around.corpus())) == (("rehearsed", "one", 2), ["text"])
    assert list(around.reference("one", seed=0) or ()) == ["call"]
    assert (around.tools(), around.describe("one")) == (({"name": "tool"},), {"kind": "one"})
