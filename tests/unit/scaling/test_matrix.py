import asyncio
from pathlib import Path

import pytest

from deepswe.errors import ConfigError
from deepswe.grading.tree import Workshop
from deepswe.progress import Silent
from deepswe.scaling.candidates import Candidate
from deepswe.scaling.checks import Checks
from deepswe.scaling.matrix import Matrix, Row, run_candidates, score_runs
from deepswe.scaling.scores import ScoreBook

CHECKS = Checks("t", "unittest", {"a.py": "", "g.py": ""}, ("a.py::A::r", "a.py::A::s"), {"g.py::A::g": "failed"})
DIFF = "diff --git a/m b/m\n--- a/m\n+++ b/m\n@@ -1 +1 @@\n-x\n+1\n"
ONE, TWO = Candidate("t", "one", DIFF), Candidate("t", "two", "")


def row(candidate: Candidate, **statuses: str) -> Row:
    return Row(
        candidate.task_id, candidate.patch_key, CHECKS.key, dict(zip(CHECKS.tests, statuses.values(), strict=True))
    )


def test_rows_are_appended_and_a_torn_line_goes_with_the_next(tmp_path: Path) -> None:
    matrix = Matrix.open(tmp_path / "deep" / "m.jsonl")
    matrix.add(row(ONE, r="passed", s="failed", g="passed"))
    with matrix.path.open("ab") as file:
        file.write(b'{"task": "t", "pa')
    again = Matrix.open(matrix.path)
    assert again.find(ONE, CHECKS) == matrix.find(ONE, CHECKS)
    assert again.find(TWO, CHECKS) is None
    again.add(row(TWO, r="passed", s="passed", g="failed"))
    assert len(Matrix.open(matrix.path).rows) == 2


def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for text in ("hello", "hello\n", '{"task": 1}\n', "[]\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"matrix"):
            Matrix.open(path)
        assert path.read_text() == text


def test_scores_follow_from_exact_statuses_and_are_written_once(tmp_path: Path) -> None:
    matrix, book = Matrix(tmp_path / "m"), ScoreBook.open(tmp_path / "s")
    matrix.add(row(ONE, r="passed", s="xpassed", g="skipped"))
    other = Candidate("u", "three", DIFF)
    for _ in range(2):
        assert score_runs([ONE, TWO, other], {"t": CHECKS}, matrix, book) == 2
    first, second, third = book.scores([ONE, TWO, other])
    assert (first.regression, first.reproduction) == (0.5, {"g.py::A::g": False})
    assert second.regression is second.reproduction is third.regression is None
    assert book.path.read_text().count("\n") == 2


def test_a_candidate_of_a_task_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    def nothing(*_: object) -> None:
        raise AssertionError("no sandbox is opened")

    workshop = Workshop(nothing, Path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="none of the recipe's tasks"):
        asyncio.run(run_candidates([ONE], {}, {"t": CHECKS}, Matrix(tmp_path / "m"), workshop, Silent()))
