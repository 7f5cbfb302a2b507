"""Finding tasks in a tiny repository, with the interpreter that runs this test as its environment."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepswe.progress import Silent
from deepswe.tasks.bundled import RepositoryRecipe, RepositorySource, make_hidden_tests, make_task
from deepswe.tasks.synth.find import Finder, Plan, Verdict, key_of, search
from deepswe.tasks.synth.isolation import find_bubblewrap
from deepswe.tasks.synth.mutation import Mutation, Site
from deepswe.tasks.synth.profile import Profile, measure
from deepswe.tasks.synth.refusal import ProjectRefused
from deepswe.tasks.synth.warm import WarmBench

CODE = '''def clamp(value, low, high):
    """Return the value, moved into the range from low to high."""
    return max(low, min(high, value))


def count_down(number):
    """Return how many steps lead to zero."""
    steps = 0
    while number > 0:
        number -= 1
        steps += 1
    return steps


def both(value):
    """Return the value in the range from 2 to 5, counted down."""
    return count_down(clamp(value, 2, 5))


def double(number):
    return 2 * number
'''
TESTS = """import pytest
from calc import both, clamp, count_down, double


@pytest.mark.parametrize(("value", "expected"), [(n, max(2, min(5, n))) for n in range(12)])
def test_clamp_moves_values(value, expected):
    assert clamp(value, 2, 5) == expected


def test_counts():
    assert count_down(3) == 3


def test_both():
    assert both(9) == 5


def test_double():
    result = double(4)
    assert result == 8


def test_nothing():
    assert CONSTANT == 1


CONSTANT = 1
"""
ARGUMENTS = ("-o", "addopts=", "--disable-plugin-autoload")


def make_source(tmp_path: Path, tests: str = TESTS) -> RepositorySource:
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
        arguments=ARGUMENTS,
    )
    return RepositorySource(recipe, base, {"tests/test_calc.py": tests})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmBench]:
    tools = tmp_path_factory.mktemp("tools")
    with WarmBench(make_source(tmp_path_factory.mktemp("calc")), Path(sys.prefix), tools=tools) as opened:
        yield opened


@pytest.fixture(scope="module")
def profile(bench: WarmBench) -> Profile:
    return measure(bench)


def bug(kind: str, old: str, new: str) -> Mutation:
    start = CODE.index(old)
    line = CODE[:start].count("\n") + 1
    function = "clamp" if line < 6 else "count_down" if line < 14 else "both"
    return Mutation(kind, (Site("calc.py", start, start + len(old), new, function, line, line),))


def verdict_on(bench: WarmBench, profile: Profile, mutation: Mutation, plan: Plan | None = None) -> Verdict:
    return Finder(bench, profile, plan or Plan()).attempt(mutation)


def test_profile_tells_which_tests_run_a_line(profile: Profile) -> None:
    assert len(profile.passing) == 16
    assert len(profile.covering["calc.py"][3]) == 13
    assert profile.covering["calc.py"][8] == {"tests/test_calc.py::test_counts", "tests/test_calc.py::test_both"}
    assert "_pytest.python" in profile.modules
    assert "calc" not in profile.modules


def test_found_tasks_have_failing_tests_a_case_and_no_word_of_the_tests(bench: WarmBench, profile: Profile) -> None:
    found = search(bench, profile, Plan(target=3, confirm=True, min_failing=2), Silent())
    assert len(found.tasks) == 3
    assert found.verdicts["task"] == 3
    for task in found.tasks:
        assert 2 <= len(task.fail_to_pass) <= 14
        assert "test" not in task.issue
        assert task.mutation.apply("calc.py", CODE) != CODE
        assert task.difficulty.failing == len(task.fail_to_pass)
        assert task.difficulty.distance in (1, 2)
    source = RepositorySource(
        bench.source.recipe.model_copy(update={"passing": found.passing}), bench.source.base, bench.source.tests
    )
    hidden = make_hidden_tests(found.tasks[0], source)
    assert hidden.fail_to_pass == found.tasks[0].fail_to_pass
    assert set(hidden.pass_to_pass) == set(profile.passing) - set(hidden.fail_to_pass)
    assert (bench.root / "calc.py").read_text() == CODE
    made = make_task(found.tasks[0], source)
    assert made.tags["failing_tests"] == str(len(hidden.fail_to_pass))
    assert made.repository.files["calc.py"] == found.tasks[0].mutation.apply("calc.py", CODE)


def test_the_same_seed_finds_the_same_and_a_journal_is_not_tried_again(bench: WarmBench, profile: Profile) -> None:
    first = list[Verdict]()
    plan = Plan(target=2)
    found = search(bench, profile, plan, Silent(), on_verdict=first.append)
    again = list[Verdict]()
    resumed = search(bench, profile, plan, Silent(), journal=first[:2], on_verdict=again.append)
    assert resumed == found
    assert again == first[2:]


@pytest.mark.parametrize(
    ("mutation", "plan", "reason"),
    [
        (bug("same", "steps = 0", "steps  = 0"), Plan(), "unnoticed"),
        (bug("endless", "number -= 1", "number += 0"), Plan(), "no end"),
        (bug("import", "count_down(clamp(value, 2, 5))\n", "value\n\n\n1 / 0\n"), Plan(), "trivial"),
        (bug("wide", "min(high, value)", "None"), Plan(max_failing=10), "too many failing"),
        (bug("narrow", "count_down(clamp", "abs(clamp"), Plan(), "unnoticed"),
        (bug("one", "value, 2, 5))", "value, 2, 4))"), Plan(min_failing=2), "too few failing"),
        (bug("silent", "2 * number", "3 * number"), Plan(), "says too little"),
        (bug("text", "return steps", "return ("), Plan(), "unsound"),
        (bug("flaky", "return steps", "return steps if hash('a') % 2 else 0"), Plan(), "flaky"),
    ],
    ids=lambda value: value.kind if isinstance(value, Mutation) else "",
)
def test_bug_that_makes_no_task_has_a_reason(
    bench: WarmBench, profile: Profile, mutation: Mutation, plan: Plan, reason: str
) -> None:
    verdict = verdict_on(bench, profile, mutation, plan)
    if mutation.kind == "flaky":  # which of the two seeds fails depends on the hash alone
        assert verdict.reason in ("flaky", "unnoticed")
    else:
        assert verdict.reason == reason
    assert verdict.key == key_of(mutation)
    assert (bench.root / "calc.py").read_text() == CODE


def test_only_failing_case_is_kept_out_of_the_issue(bench: WarmBench, profile: Profile) -> None:
    task = verdict_on(bench, profile, bug("one", "value, 2, 5))", "value, 2, 4))")).task
    assert task is not None
    assert task.fail_to_pass == ("tests/test_calc.py::test_both",)
    assert "both(9)" not in task.issue
    assert "9" not in task.issue
    assert "both" in task.issue


def test_run_that_takes_too_long_ends_with_what_it_started(bench: WarmBench) -> None:
    run = bench.run_tests(["tests/test_calc.py"], ["tests/test_calc.py::test_counts"], timeout_s=0.001)
    assert not run.complete
    assert run.timed_out
    assert bench.run_script("print(6 * 7)", timeout_s=20.0) == "42\n"


def test_tests_see_no_network(bench: WarmBench) -> None:
    script = "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 9), 1)\n"
    script += "except OSError as error:\n    print(error.errno)"
    if find_bubblewrap():
        assert bench.run_script(script, timeout_s=20.0) == f"{errno.ENETUNREACH}\n"


def test_project_without_tests_or_with_failing_ones_is_refused(tmp_path: Path) -> None:
    network = "import socket\nimport pytest\n\n\n@pytest.mark.parametrize('n', range(6))\ndef test_net(n):\n"
    network += "    socket.create_connection(('name.invalid', 80), 1)\n"
    with (
        WarmBench(make_source(tmp_path, network), Path(sys.prefix), tools=tmp_path) as opened,
        pytest.raises(
            ProjectRefused, match="only 0 of 6 tests pass, and at least 5 are needed; 6 fail for want of the network"
        ) as caught,
    ):
        measure(opened)
    assert caught.value.reason == "needs-network"


def test_a_bug_that_kills_the_fork_server_is_a_crash_and_the_search_goes_on(bench: WarmBench, profile: Profile) -> None:
    killer = bug("constant", "steps = 0", "os = __import__('os'); steps = 0 * (os.kill(os.getppid(), 9) or 1)")
    assert verdict_on(bench, profile, killer).reason == "crash"
    assert verdict_on(bench, profile, bug("constant", "number > 0", "number > 1")).reason == "task"
