"""A verifier from recorded attempts to scores, in a small model."""

import json
from pathlib import Path

import pytest

from deepswe.errors import ConfigError, RunError
from deepswe.progress import Silent
from deepswe.rollout.store import TrajectoryStore
from deepswe.scaling.candidates import load_candidates
from deepswe.scaling.scores import ScoreBook
from deepswe.scaling.verifier_prompt import Reading
from deepswe.scaling.verifier_recipe import VerifierRecipe
from deepswe.session.verifier import CARD, load_verifier, score_candidates, train_verifier, with_issues
from deepswe.types import Ending, Graded, Step, TokenSpan, Trajectory, Ungraded

PATCH = "diff --git a/m b/m\n--- a/m\n+++ b/m\n@@ -1 +1 @@\n-x\n+{}\n"


def record(run: Path, tasks: int) -> Path:
    """Each task has two right attempts, three wrong ones and one without a verdict."""
    with TrajectoryStore(run).begin("train", 0, keep=False)[0] as segment:
        for task in range(tasks):
            tags = {"issue": f"m is wrong {task}", "repo": f"r{task % 5}"}
            for attempt in range(6):
                grade = Ungraded("died") if attempt == 5 else Graded(float(attempt < 2))
                spans = (TokenSpan((1,), True, (0.0,)),)
                patch = PATCH.format("good" if attempt < 2 else "bad")
                trajectory = Trajectory(
                    f"t{task}", attempt, "train", 0, spans, (Step("do", None, "ok"),), Ending.SUBMITTED, grade, patch
                )
                segment.append(Trajectory(**{n: getattr(trajectory, n) for n in trajectory.__slots__} | {"tags": tags}))
        segment.commit()
    return run


def recipe(directory: Path, run: Path, **training: float) -> VerifierRecipe:
    return VerifierRecipe.model_validate(
        {
            "run": {"name": "v", "directory": directory, "threads": 1},
            "model": {
                "scratch": {
                    "hidden_size": 16,
                    "layers": 1,
                    "heads": 2,
                    "key_value_heads": 2,
                    "intermediate_size": 32,
                    "vocabulary": 400,
                }
            },
            "data": {"runs": [run], "heldout_share": 0.5},
            "prompt": {"style": "brief", "budget": 200},
            "training": {"epochs": 2, "batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 2, **training},
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verifier")
    run = record(directory / "run", 15)
    answer = train_verifier(recipe(directory, run), resume=False, progress=Silent())
    assert answer["train"] % 2 == 0
    assert answer["heldout"] > 0
    assert answer["ungraded"] == 15
    assert answer["prior"] == pytest.approx(0.4)
    assert answer["updates"] == -(-2 * answer["train"] // 8)
    assert answer["calibration"]["candidates"] == answer["heldout"]
    return directory


def test_a_finished_training_is_only_read_and_another_recipe_refused(trained: Path) -> None:
    before = (trained / "v" / "summary.json").read_bytes()
    again = train_verifier(recipe(trained, trained / "run"), resume=True, progress=Silent())
    assert again == json.loads(before)
    with pytest.raises(RunError, match="another recipe"):
        train_verifier(recipe(trained, trained / "run", epochs=3), resume=True, progress=Silent())


def test_a_verifier_scores_each_candidate_once_and_goes_on_where_it_was(trained: Path, tmp_path: Path) -> None:
    candidates, _ = load_candidates(trained / "run")
    book = ScoreBook.open(tmp_path / "scores.jsonl")
    judge = load_verifier(trained / "v", threads=1)
    first = score_candidates(candidates[:10], judge, book, Silent())
    assert (first["scored"], first["known"], first["missing"]) == (10, 0, 0)
    second = score_candidates(candidates, judge, ScoreBook.open(book.path), Silent())
    assert (second["scored"], second["known"]) == (len(candidates) - 10, 10)
    assert second["calibration"]["candidates"] == 75
    scores = ScoreBook.open(book.path).scores(candidates)
    assert all(score.verifier is not None and 0.0 <= score.verifier <= 1.0 for score in scores)
    assert len(book.path.read_text().splitlines()) == len(candidates)


def test_a_missing_answer_is_counted_and_is_no_score(trained: Path, tmp_path: Path) -> None:
    class Silenced:
        async def judge(self, readings: list[Reading]) -> list[float | None]:
            return [None if "bad" in reading.patch else 0.5 for reading in readings]

    candidates, _ = load_candidates(trained / "run")
    book = ScoreBook.open(tmp_path / "scores.jsonl")
    answer = score_candidates(candidates, Silenced(), book, Silent())  # type: ignore[arg-type]
    assert answer["missing"] == 60
    assert answer["calibration"]["missing"] == 45
    assert [score.verifier for score in book.scores(candidates[:6])] == [0.5, 0.5, None, None, None, None]


def test_a_training_that_was_stopped_ends_as_one_that_was_not(trained: Path, tmp_path: Path) -> None:
    class Stopping(Silent):
        updates = 0

        def advance(self, pieces: int = 1, note: str = "") -> None:
            self.updates += bool(note)
            if self.updates == 6:
                raise KeyboardInterrupt

    wanted = recipe(tmp_path, trained / "run")
    with pytest.raises(KeyboardInterrupt):
        train_verifier(wanted, resume=False, progress=Stopping())
    with pytest.raises(ConfigError, match="holds no trained verifier"):
        load_verifier(tmp_path / "v")
    answer = train_verifier(wanted, resume=True, progress=Silent())
    straight = json.loads((trained / "v" / "summary.json").read_text())
    assert answer["calibration"] == pytest.approx(straight["calibration"])
    assert json.loads((tmp_path / "v" / CARD).read_text())["prior"] == pytest.approx(0.4)


def test_a_candidate_without_an_issue_needs_its_task(trained: Path) -> None:
    candidates, _ = load_candidates(trained / "run")
    assert with_issues(candidates, {}) == list(candidates)
    (bare,) = with_issues([candidates[0].__class__("t", "c", "+1")], {"t": "broken"})
    assert bare.issue == "broken"
    with pytest.raises(ConfigError, match="comes without an issue"):
        with_issues([bare.__class__("u", "c", "+1")], {"t": "broken"})
