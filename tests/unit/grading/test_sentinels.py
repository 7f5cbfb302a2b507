from __future__ import annotations

import ast
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepswe.grading.sentinels import mix_sentinels, other_value
from deepswe.tasks.synth.micro.generate import micro_task
from deepswe.tasks.task import HiddenTests

FILE = """import pytest
from shop import double


def test_double():
    x = 5
    assert double(x) == [10, {"a": 1}]


@pytest.mark.parametrize("x", [1])
def test_many(x):
    assert double(x) == 2


class TestMore:
    def test_words(self):
        assert "ab" == double("a")

VALUE = 3
"""
IDS = ("t/test_a.py::test_double", "t/test_a.py::TestMore::test_words", "t/test_a.py::test_many[1]")


def hidden(text: str, ids: tuple[str, ...] = IDS) -> HiddenTests:
    return HiddenTests("t", {"t/test_a.py": text, "t/data.txt": "x"}, ids[:1], ids[1:])


def test_a_sentinel_is_a_copy_with_another_literal() -> None:
    mixed = mix_sentinels(hidden(FILE), random.Random(1))
    text = mixed.files["t/test_a.py"]
    before, after = ast.parse(FILE), ast.parse(text)
    names = {test.split("::")[-1] for test in mixed.sentinels}
    assert len(names) == 2
    assert len(list(ast.walk(after))) > len(list(ast.walk(before)))
    assert "double(x) == [" in text.split("VALUE = 3")[1]
    assert [test for test in mixed.tests if test not in mixed.sentinels] == list(IDS)
    assert mixed.files["t/data.txt"] == "x"
    for name in names:
        assert f"def {name}(" in text
        assert name.startswith(("test_double", "test_words"))


def test_each_grading_draws_anew_and_runs_a_sentinel_after_its_model() -> None:
    drawn = [mix_sentinels(hidden(FILE), random.Random(seed)) for seed in range(20)]
    assert len({tuple(sorted(mixed.sentinels)) for mixed in drawn}) > 5
    for mixed in drawn:
        for test in mixed.sentinels:
            model = IDS[0] if "test_double" in test else IDS[1]
            assert mixed.tests.index(test) > mixed.tests.index(model)


def test_micro_tasks_get_sentinels_that_look_like_their_tests() -> None:
    _, tests = micro_task("train", 0, seed=0)
    mixed = mix_sentinels(tests, random.Random(0))
    assert len(mixed.sentinels) == 2
    assert all("::test_" in test and test[-1].isdigit() for test in mixed.sentinels)


@pytest.mark.parametrize("text", ["def broken(:", "x = 1\rdef test_double(): assert 1 == 2\n", "test = 1\n", "\0"])
def test_a_file_without_room_for_a_sentinel_is_left_alone(text: str) -> None:
    mixed = mix_sentinels(hidden(text), random.Random(0))
    assert mixed.files["t/test_a.py"] == text
    assert not mixed.sentinels
    assert mixed.tests == IDS


def test_where_nothing_can_be_copied_an_imported_name_is_compared() -> None:
    text = "from shop import double\n\ndef test_double():\n    assert double(5)"
    mixed = mix_sentinels(hidden(text, IDS[:1]), random.Random(0))
    (name,) = mixed.sentinels
    assert mixed.files["t/test_a.py"].startswith(text)
    assert f"def {name.split('::')[1]}():\n    assert double == " in mixed.files["t/test_a.py"]


def test_a_name_that_may_equal_anything_is_never_the_subject() -> None:
    text = "from unittest.mock import ANY\nfrom shop import double\n\ndef test_double():\n    assert double(5)\n"
    for seed in range(20):
        mixed = mix_sentinels(hidden(text, IDS[:1]), random.Random(seed))
        assert "ANY ==" not in mixed.files["t/test_a.py"]


def test_no_sentinel_is_made_from_a_test_that_must_not_pass() -> None:
    text = "def test_double():\n    assert 5 + 5 == 10\n"
    mixed = mix_sentinels(replace(hidden(text, IDS[:1]), expected={IDS[0]: "skipped"}), random.Random(0))
    assert not mixed.sentinels


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner)),
    max_leaves=6,
)


@given(VALUES, st.randoms(use_true_random=False))
def test_the_other_value_is_never_equal(value: object, rng: random.Random) -> None:
    other = other_value(value, rng)
    assert other != value
    if value is not None:
        assert type(other) is type(value)
