"""Filters, needs, judgements and issue texts of commits, without a repository."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from deepswe.errors import TaskError
from deepswe.tasks.synth.bench import TestRun
from deepswe.tasks.synth.commits import Record, agree, judge, quarter_end
from deepswe.tasks.synth.commits_history import Change, Commit
from deepswe.tasks.synth.commits_issue import compose, leaks, message_text
from deepswe.tasks.synth.commits_needs import KNOWN_GOOD, find_version, read_needs
from deepswe.tasks.synth.commits_run import repository_name
from deepswe.tasks.synth.commits_select import Candidate, Limits, files_to_run, is_code_path, is_test_path, select

TEXTS = {"a": "x = 1\n", "b": "x = 2\n", "c": "# a comment\nx = 1\n", "": "", "old": "print 'x'\n"}


def change(path: str, before: str = "a", after: str = "b", lines: int = 1) -> Change:
    return Change(path, before, after, lines, 0)


def commit(*changes: Change, parents: int = 1) -> Commit:
    return Commit("c" * 40, ("p" * 40,) * parents, datetime(2024, 5, 6, tzinfo=UTC), "A change of x", changes)


TEST = change("tests/test_x.py")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (commit(change("pkg/x.py"), TEST, parents=0), "first commit"),
        (commit(parents=2), "merge"),
        (commit(), "no change"),
        (commit(change("README.md"), TEST), "no code change"),
        (commit(change("setup.py"), change("docs/conf.py"), TEST), "no code change"),
        (commit(change("pkg/x.py")), "no test change"),
        (commit(change("pkg/x.py"), change("tests/test_x.py", after="")), "no test change"),
        (commit(change("pkg/x.py"), Change("tests/x.bin", "", "b", -1, -1)), "binary file or link"),
        (commit(change("pkg/x.py"), Change("tests/x.py", "", "b", 1, 0, special=True)), "binary file or link"),
        (commit(*(change(f"pkg/x{n}.py") for n in range(5)), TEST), "too many files"),
        (commit(change("pkg/x.py", lines=200), TEST), "too many lines"),
        (commit(change("pkg/x.py", after="c"), TEST), "only comments or documentation"),
        (commit(change("pkg/x.py", after="old"), TEST), "no Python 3"),
        (commit(change("pkg/x.py", after="gone"), TEST), "no UTF-8"),
    ],
)
def test_commit_is_refused_with_a_reason(made: Commit, reason: str) -> None:
    assert select(made, Limits(), TEXTS.get) == reason


def test_commit_within_the_limits_is_a_candidate() -> None:
    chosen = select(
        commit(*(change(f"pkg/x{n}.py", lines=49) for n in range(4)), change("CHANGES.md"), TEST), Limits(), TEXTS.get
    )
    assert isinstance(chosen, Candidate)
    assert (len(chosen.code), chosen.lines, len(chosen.tests)) == (4, 196, 1)


def test_which_paths_are_tests_and_which_are_code() -> None:
    assert is_test_path("tests/data/x.txt")
    assert is_test_path("pkg/test/helper.py")
    assert is_test_path("conftest.py")
    assert not is_test_path("pkg/testing.py")
    assert is_code_path("src/pkg/locale/de.po")
    assert is_code_path("single.py")
    assert not any(map(is_code_path, ["README.md", "pyproject.toml", ".github/x.py", "docs/x.py", "tests/x.py"]))


def test_changed_data_of_tests_runs_the_modules_beside_it() -> None:
    candidate = Candidate(commit(), (), (change("tests/unit/data/x.txt"),))
    files = ["tests/test_a.py", "tests/unit/test_b.py", "tests/util.py", "other/test_c.py"]
    assert files_to_run(candidate, files) == ("tests/test_a.py", "tests/unit/test_b.py")
    assert files_to_run(candidate, files, most=1) == ()
    assert files_to_run(Candidate(commit(), (), (TEST, change("tests/x.txt"))), files) == ("tests/test_x.py",)


def test_needs_come_from_pyproject_groups_extras_and_the_markers_of_this_python() -> None:
    needs = read_needs(
        {
            "pyproject.toml": """
[project]
name = "calc"
version = "1.2"
license = {text = "MIT"}
dependencies = ["tiny>=1; python_version >= '3'", "old; python_version < '3'", "far @ https://x.example/far.whl"]
[project.optional-dependencies]
test = ["freezegun", "calc[extra]", "mypy"]
[dependency-groups]
tests = ["pytest>=8", {include-group = "more"}]
more = ["hypothesis", {include-group = "tests"}]
[tool.hatch.build.hooks.vcs]
version-file = "src/calc/_version.py"
"""
        }
    )
    assert (needs.name, needs.version, needs.license) == ("calc", "1.2", "MIT")
    assert needs.runtime == ("tiny>=1",)
    assert needs.tests == ("freezegun", "hypothesis", "pytest>=8")
    assert needs.version_file == "src/calc/_version.py"
    assert needs.requirements() == ("freezegun", "hypothesis", "pytest>=8", "tiny>=1")
    assert needs.requirements(tests=False) == ("pytest", "tiny>=1")


def test_needs_come_from_a_setup_script_that_is_never_run() -> None:
    script = (
        "raise SystemExit\nneeds = ['six']\n"
        "setup(name='calc', install_requires=needs, extras_require={'test': ['mock']})"
    )
    needs = read_needs({"setup.py": script, "tox.ini": "[testenv]\ndeps =\n    nose\n"})
    assert (needs.name, needs.runtime, needs.tests) == ("calc", ("six",), ("mock",))


def test_needs_come_from_setup_cfg_requirement_files_tox_and_poetry() -> None:
    config = "[metadata]\nname = calc\n[options]\ninstall_requires =\n    six\n    attrs>=2\n"
    files = {"setup.cfg": config, "requirements-test.txt": "-r x\nmock  # for old\nflake8\n"}
    assert read_needs(files).runtime == ("attrs>=2", "six")
    assert read_needs(files).tests == ("mock",)
    assert read_needs({"tox.ini": "[testenv]\ndeps =\n    py311: mock\n    nose\n"}).tests == ("mock", "nose")
    poetry = (
        '[tool.poetry]\nname = "calc"\n[tool.poetry.dependencies]\npython = "^3.8"\nsix = "^1.2"\nx = "~0.3"\ny = "*"\n'
    )
    assert read_needs({"pyproject.toml": poetry}).runtime == ("six<2,>=1.2", "x<0.4,>=0.3", "y")


def test_malformed_metadata_counts_as_absent() -> None:
    needs = read_needs({"pyproject.toml": "[", "setup.py": "def", "setup.cfg": "x", "tox.ini": "x"})
    assert needs.requirements() == ("pytest",)
    assert KNOWN_GOOD[0] == "pytest<9"
    assert find_version(["", '__version__ = "3.4"\n']) == "3.4"


def run(complete: bool = True, timed_out: bool = False, **statuses: str) -> TestRun:
    return TestRun(complete, statuses, timed_out=timed_out)


def test_judgement_of_two_runs() -> None:
    found = judge(run(a="failed", b="passed", c="skipped"), run(a="passed", b="passed", c="skipped", new="passed"))
    assert (found.fail_to_pass, found.pass_to_pass, found.refusal) == (("a", "new"), ("b",), "")
    assert judge(run(a="passed"), run(a="failed", b="passed")).refusal == "regression"
    assert judge(run(a="passed", gone="passed"), run(a="passed")).refusal == "no failing test"
    assert judge(run(a="failed"), run(a="failed")).refusal == "no passing test"
    assert judge(run(), run(False, True)).refusal == "tests do not end"
    assert judge(run(False, True), run(a="passed")).refusal == "old code does not end"
    assert judge(run(), run(False)).refusal == "tests do not run"


def test_tests_that_differ_between_repeats_are_left_out() -> None:
    assert agree([run(a="passed", b="passed"), run(a="passed", b="failed")]).statuses == {"a": "passed"}
    assert not agree([run(a="passed"), run(False)]).complete


def test_quarter_ends() -> None:
    assert quarter_end(date(2024, 5, 6)) == date(2024, 7, 1)
    assert quarter_end(date(2024, 12, 31)) == date(2025, 1, 1)


CANDIDATE = Candidate(commit(), (change("pkg/x.py"),), (TEST,))
PATCH = "+++ b/pkg/x.py\n+    return value.strip().lower()\n-    return value\n"


def test_message_loses_references_trailers_tests_and_lines_of_the_patch() -> None:
    message = """fix(core): strip white space around values (#12)

Values with blanks were not found.
Also see test_strip in tests/test_x.py.
Now it says return value.strip().lower() instead.

Fixes #13
Co-authored-by: Somebody <a@b.c>
"""
    text = message_text(message, CANDIDATE, ["tests/test_x.py::TestX::test_strip[a]"], PATCH)
    assert text == "strip white space around values\n\nValues with blanks were not found."


def test_message_of_no_words_is_no_issue() -> None:
    assert message_text("Fix typo", CANDIDATE, [], "") == ""
    assert message_text("#12", CANDIDATE, [], "") == ""


def test_leaks_are_names_of_tests_their_files_and_lines_of_the_patch() -> None:
    failing = ["tests/test_x.py::TestX::test_strip[a b]"]
    assert leaks("see TestX", CANDIDATE, failing, PATCH) == "TestX"
    assert leaks("in test_x.py", CANDIDATE, failing, PATCH) == "test_x.py"
    assert leaks("use  return value.strip().lower()", CANDIDATE, failing, PATCH) == "return value.strip().lower()"
    assert leaks("TestXY strips", CANDIDATE, failing, PATCH) == ""


def test_issue_is_words_and_case_or_either() -> None:
    assert compose("words", "case\n") == "words\n\ncase\n"
    assert compose("", "case\n") == "case\n"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/home/a/calc", "calc"),
        ("/home/a/calc/.git", "calc"),
        ("https://x.example/a/calc.git", "calc"),
        ("git@x.example:a/calc.git", "calc"),
    ],
)
def test_repository_is_named_by_the_end_of_its_place(source: str, name: str) -> None:
    assert repository_name(source) == name


def test_a_file_of_somebody_else_is_refused_as_a_record_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text('{"title": "mine"}')
    with pytest.raises(TaskError, match="no record of this search"):
        Record(path, {"name": "x"})
    assert path.read_text() == '{"title": "mine"}'
