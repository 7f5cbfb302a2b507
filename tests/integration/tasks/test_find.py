"""Finding tasks in a tiny repository, with the interpreter that runs this test as its environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepswe.errors import TaskError
from deepswe.progress import Silent
from deepswe.tasks.bundled import RepositoryRecipe, RepositorySource, make_hidden_tests
from deepswe.tasks.synth.bench import Bench
from deepswe.tasks.synth.find import Plan, measure, search

CODE = '''def clamp(value, low, high):
    """Return the value, moved into the range from low to high."""
    return max(low, min(high, value))
'''
TESTS = """import pytest
from calc import clamp


@pytest.mark.parametrize(("value", "expected"), [(n, max(2, min(5, n))) for n in range(12)])
def test_clamp_moves_values(value, expected):
    assert clamp(value, 2, 5) == expected
"""


@pytest.fixture
def source(tmp_path: Path) -> RepositorySource:
    base = tmp_path / "base"
    base.mkdir()
    (base / "calc.py").write_text(CODE)
    recipe = RepositoryRecipe(
        name="calc",
        version="1.0",
        sha256="0" * 64,
        license="MIT",
        split="train",
        code=("calc.py",),
        tests=("tests",),
        requirements=(),
        arguments=("-o", "addopts=", "--disable-plugin-autoload"),
    )
    return RepositorySource(recipe, base, {"tests/test_calc.py": TESTS})


def test_found_task_has_two_failing_tests_a_replayed_case_and_no_word_of_the_tests(
    source: RepositorySource, tmp_path: Path
) -> None:
    plan = Plan(target=1, repeats=1, max_failing_share=0.9, per_kind=1)
    with Bench(source, Path(sys.prefix)) as bench:
        root = bench.root
        profile = measure(bench, tmp_path / "none", plan)
        assert len(profile.passing) == 12
        assert len(profile.covering["calc.py"][3]) == 12
        found = search(bench, profile, plan, Silent())
    assert not root.exists()
    [task] = found.tasks
    assert found.verdicts["task"] == 1
    assert 2 <= len(task.fail_to_pass) <= 10
    assert "clamp(" in task.issue
    assert "test" not in task.issue
    assert task.mutation.apply(CODE) != CODE
    whole = RepositorySource(source.recipe.model_copy(update={"passing": found.passing}), source.base, source.tests)
    hidden = make_hidden_tests(task, whole)
    assert len(hidden.fail_to_pass + hidden.pass_to_pass) == 12


def test_repository_with_too_few_passing_tests_is_refused(source: RepositorySource, tmp_path: Path) -> None:
    few = RepositorySource(source.recipe, source.base, {"tests/test_calc.py": TESTS.replace("range(12)", "range(3)")})
    with Bench(few, Path(sys.prefix)) as bench, pytest.raises(TaskError, match="only 3 tests pass every time"):
        measure(bench, tmp_path / "none", Plan(repeats=1))


def test_command_that_takes_too_long_is_ended_and_the_bench_stays_usable(source: RepositorySource) -> None:
    with Bench(source, Path(sys.prefix)) as bench:
        assert bench.run_script("while True: pass", timeout_s=1.0) is None
        assert bench.run_script("print(6 * 7)", timeout_s=60.0) == "42\n"
