"""What a benchmark holds is found under other names, and what only looks like it stays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepswe.errors import StoreError
from deepswe.tasks.benchmarks import canonical_repository, is_evaluation_repository, same_repository
from deepswe.tasks.decontaminate import (
    Reference,
    decontaminate,
    read_reference,
    reference_of,
    shipped_references,
)
from deepswe.tasks.task import HiddenTests, Repository, Task, TaskSet

from .source_rows import PATCH, swegym_row

pytest.importorskip("datasketch")

STATEMENT = """Calling the exporter with an empty list writes a header of three columns and then fails with an
index error. It should write the header alone. The importer does the right thing for the same list since the last
release."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def set_of(repo: str = "own/thing", text: str = "Nothing alike here.", commit: str = "", patch: str = "") -> TaskSet:
    task = Task("a", repo, text, Repository(), "own", "train", base_commit=commit)
    return TaskSet((task,), {"a": HiddenTests("a", {}, ("t.py::a",), (), gold_patch=patch)})


def reasons(tasks: TaskSet, *references: Reference) -> list[tuple[str, str]]:
    return [(row.reason, row.match) for row in decontaminate(tasks, references or shipped_references()).removed]


@pytest.mark.parametrize(
    ("repo", "reason", "match"),
    [
        ("django/django", "repository", "django/django"),
        ("https://github.com/Django/Django.git", "repository", "django/django"),
        ("PyCQA/pylint", "repository", "pylint-dev/pylint"),
        ("kennethreitz/requests", "repository", "psf/requests"),
        ("swesmith/pylint-dev__astroid.b114f6b5", "repository", "pylint-dev/astroid"),
        ("sympy", "repository", "sympy/sympy"),
        ("sklearn", "repository", "scikit-learn/scikit-learn"),
        ("somebody/matplotlib", "fork", "matplotlib/matplotlib"),
        ("me/flask-fork", "fork", "pallets/flask"),
        ("me/fork-of-pytest", "fork", "pytest-dev/pytest"),
        ("gin-gonic/gin", "repository", "gin-gonic/gin"),
    ],
)
def test_a_repository_is_known_under_its_other_names(repo: str, reason: str, match: str) -> None:
    assert reasons(set_of(repo))[0] == (reason, match)


@pytest.mark.parametrize(
    "repo", ["encode/django-rest-framework", "maxcountryman/flask-login", "home-assistant/core", "own/json", "aio/http"]
)
def test_a_repository_that_only_looks_alike_stays(repo: str) -> None:
    assert reasons(set_of(repo)) == []


def test_a_commit_is_known_by_its_beginning_and_as_a_parent() -> None:
    reference = reference_of("bench", set_of("bench/one", "", COMMIT))
    for commit in (COMMIT, COMMIT[:8], f"{COMMIT}^", COMMIT.upper()):
        assert reasons(set_of(commit=commit), reference) == [("commit", "a")]
    assert reasons(set_of(commit=COMMIT[:4]), reference) == []


def test_a_patch_is_known_in_a_renamed_package_and_reversed() -> None:
    long = PATCH.replace("return a - b\n+    return a + b", "return a - b * 3\n+    return max(a, b) + sum([a, b, 17])")
    reference = reference_of("bench", set_of("bench/one", "", patch=long))
    renamed = long.replace("pkg/", "other/place/").replace("def add(a, b)", "def plus(a, b)")
    assert reasons(set_of(patch=renamed), reference) == [("patch", "a")]
    reversed_ = long.replace("\n-", "\n?").replace("\n+ ", "\n- ").replace("\n? ", "\n+ ")
    assert reasons(set_of(patch=reversed_), reference) == [("patch", "a")]
    assert (
        reasons(set_of(patch=long.replace("max(a, b) + sum([a, b, 17])", "a.join(str(q) for q in b)")), reference) == []
    )


def test_a_tiny_patch_must_be_the_same_in_a_file_of_the_same_name() -> None:
    tiny = PATCH.replace("return a - b", "pass").replace("return a + b", "1")
    reference = reference_of("bench", set_of("bench/one", "", patch=tiny))
    assert reasons(set_of(patch=tiny.replace("pkg/", "deep/er/")), reference) == [("patch", "a")]
    assert reasons(set_of(patch=tiny.replace("core.py", "else.py")), reference) == []


def test_a_reworded_text_is_known_and_another_one_is_not() -> None:
    reference = reference_of("bench", set_of("bench/one", STATEMENT))
    framed = f"## Bug\n{STATEMENT.upper().replace('RIGHT THING', 'correct thing')}\n\n## Steps\nrun it"
    assert reasons(set_of(text=framed), reference) == [("text", "a")]
    assert reasons(set_of(text="The importer fails with an index error for a list of columns."), reference) == []


def test_the_rest_of_the_set_stays_as_it_is() -> None:
    one, two = set_of("django/django"), set_of("own/thing")
    other = replace(two.tasks[0], id="b")
    tasks = TaskSet((one.tasks[0], other), {**one.hidden, "b": replace(two.hidden["a"], task_id="b")})
    answer = decontaminate(tasks, shipped_references())
    assert [task.id for task in answer.tasks.tasks] == ["b"]
    assert list(answer.tasks.hidden) == ["b"]
    assert [(row.id, row.against, row.score) for row in answer.removed] == [("a", "swe-bench", 1.0)]


def test_a_list_of_ones_own_is_names_or_rows(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("# ours\nOwn/Thing  # and why\n\n")
    assert reasons(set_of("own/thing"), read_reference(tmp_path / "mine.txt")) == [("repository", "own/thing")]
    (tmp_path / "rows.jsonl").write_text(json.dumps(swegym_row(base_commit=COMMIT)))
    reference = read_reference(tmp_path / "rows.jsonl")
    assert reasons(set_of("ACME/tool"), reference) == [("repository", "acme/tool")]
    assert reasons(set_of(commit=COMMIT), reference) == [("commit", "acme__tool-12")]
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(StoreError, match="no row that can be used"):
        read_reference(tmp_path / "bad.jsonl")


def test_names_have_one_spelling() -> None:
    assert canonical_repository("git@github.com:Django/django.git") == "django/django"
    assert canonical_repository("getmoto__moto") == "getmoto/moto"
    assert is_evaluation_repository("mitsuhiko/flask")
    assert not is_evaluation_repository("someone/flask")
    assert same_repository("someone/flask", {"pallets/flask"}) == ("pallets/flask", "fork")
