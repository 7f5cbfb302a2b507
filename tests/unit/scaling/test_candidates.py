import json
from pathlib import Path

import pytest

from deepswe.errors import ConfigError
from deepswe.evaluation.results import load_results, open_evaluation
from deepswe.rollout.store import TrajectoryStore
from deepswe.scaling.candidates import Candidate, load_candidates, prediction
from deepswe.scaling.rank import rank
from deepswe.scaling.scores import ScoreBook
from deepswe.types import Ending, Graded, Message, Step, TokenSpan, Trajectory, Ungraded

DIFF = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x\n+{}\n"


def row(task: str, name: str, patch: str) -> dict[str, str]:
    return {"instance_id": task, "model_name_or_path": name, "model_patch": patch}


def test_predictions_are_read_as_list_object_and_lines(tmp_path: Path) -> None:
    rows = [row("a", "m", "1"), row("b", "m", "2")]
    forms = {
        "list.json": json.dumps(rows),
        "object.json": json.dumps({r["instance_id"]: r for r in rows}),
        "lines.jsonl": "\n".join(map(json.dumps, rows)) + "\n\n",
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text)
        candidates, refused = load_candidates(tmp_path / name)
        assert [(c.task_id, c.name, c.patch) for c in candidates] == [("a", "m", "1"), ("b", "m", "2")]
        assert not refused


def test_several_predictions_of_one_model_for_one_task_keep_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row("a", "m", patch)) for patch in "123"))
    candidates, _ = load_candidates(tmp_path / "p.jsonl")
    assert [(c.name, c.patch) for c in candidates] == [("m", "1"), ("m#2", "2"), ("m#3", "3")]


def test_a_broken_record_is_refused_with_its_place_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        json.dumps(row("a", "m", "1")) + '\n{"instance_id": 3}\n{"instance_id": "b", "model_patch": [1]}\n{"ins'
    )
    candidates, refused = load_candidates(path)
    assert [c.task_id for c in candidates] == ["a"]
    assert [item.place.rpartition(":")[2] for item in refused] == ["2", "3", "4"]
    assert "not the name of a task" in refused[0].reason
    assert "is a list, not a diff" in refused[1].reason
    assert "not JSON" in refused[2].reason


def test_trajectory_files_of_both_agents_are_read_with_their_turns(tmp_path: Path) -> None:
    mini = {
        "instance_id": "a__a-1",
        "info": {"submission": DIFF.format("mini"), "exit_status": "Submitted"},
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": [{"type": "text", "text": "t"}]},
        ],
    }
    swe = {
        "info": {"submission": None},
        "trajectory": [{"thought": "think", "action": "ls", "response": "think ls", "observation": "files"}],
    }
    for folder, name, record in (("mini", "a__a-1.traj.json", mini), ("swe", "b__b-2.traj", swe)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(json.dumps(record))
    (tmp_path / "swe" / "broken.traj").write_text("{")
    candidates, refused = load_candidates(tmp_path)
    assert [(c.task_id, c.name, c.patch) for c in candidates] == [
        ("a__a-1", "mini", DIFF.format("mini")),
        ("b__b-2", "swe", ""),
    ]
    assert candidates[0].turns == (Message("system", "s"), Message("assistant", "t"))
    assert candidates[1].turns == (Message("assistant", "think ls"), Message("user", "files"))
    assert len(refused) == 1


def test_a_run_of_ours_gives_patches_outcomes_and_turns(tmp_path: Path) -> None:
    def trajectory(attempt: int, grade: Graded | Ungraded) -> Trajectory:
        spans = (TokenSpan((1, 2), True, (0.0, 0.0)),)
        steps = (Step("do", None, "done"),)
        return Trajectory("t", attempt, "after_heldout", 3, spans, steps, Ending.SUBMITTED, grade, DIFF.format(attempt))

    with TrajectoryStore(tmp_path).begin("after_heldout", 3, keep=False)[0] as segment:
        for attempt, grade in enumerate((Graded(1.0), Graded(0.5), Ungraded("sandbox died"))):
            segment.append(trajectory(attempt, grade))
        segment.commit()
    candidates, _ = load_candidates(tmp_path, phase="after_heldout")
    assert [(c.name, c.outcome, c.tokens) for c in candidates] == [
        ("after_heldout-3-0", 1.0, 2),
        ("after_heldout-3-1", 0.0, 2),
        ("after_heldout-3-2", None, 2),
    ]
    assert candidates[0].turns == (Message("assistant", "do"), Message("user", "done"))


def test_nothing_to_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run, predictions file or directory"):
        load_candidates(tmp_path / "missing")
    with pytest.raises(ConfigError, match="holds no candidate"):
        load_candidates(tmp_path)


def test_a_run_without_a_finished_evaluation_says_how_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    with pytest.raises(ConfigError, match=r"no finished evaluation; go on with `deepswe eval .* --resume`"):
        load_candidates(tmp_path)
    for read in (open_evaluation, load_results):
        with pytest.raises(ConfigError, match=r"no finished evaluation; go on with `deepswe eval .* --resume`"):
            read(str(tmp_path))


def test_scores_are_kept_by_key_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    one, two = Candidate("t", "a", DIFF.format(1)), Candidate("t", "b", DIFF.format(2))
    book = ScoreBook.open(tmp_path / "s.jsonl")
    book.append(one, verifier=0.25)
    book.append(two, regression=0.5, reproduction={"n": True})
    book.append(one, verifier=0.75)
    with book.path.open("ab") as file:
        file.write(b'{"task": "t", "cand')
    again = ScoreBook.open(book.path)
    first, second = again.scores([one, two])
    assert (first.verifier, first.regression) == (0.75, None)
    assert (second.regression, second.reproduction) == (0.5, {"n": True})
    assert again.has(one, "verifier")
    assert not again.has(two, "verifier")
    again.append(two, verifier=0.1)
    assert ScoreBook.open(book.path).has(two, "verifier")


def test_a_score_of_another_patch_under_the_same_name_does_not_count(tmp_path: Path) -> None:
    book = ScoreBook.open(tmp_path / "s.jsonl")
    book.append(Candidate("t", "a", DIFF.format(1)), verifier=0.9)
    assert book.scores([Candidate("t", "a", DIFF.format(2))])[0].verifier is None


def test_a_file_that_is_no_score_file_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(ConfigError, match=r"s\.jsonl:1 is no score"):
        ScoreBook.open(tmp_path / "s.jsonl")


def test_ties_go_to_the_shared_patch_and_never_to_an_empty_one(tmp_path: Path) -> None:
    candidates = [
        Candidate("t", "empty", ""),
        Candidate("t", "lone", DIFF.format(1)),
        Candidate("t", "twin 1", DIFF.format(22)),
        Candidate("t", "twin 2", DIFF.format(22)),
    ]
    book = ScoreBook.open(tmp_path / "s.jsonl")
    for order in (candidates, candidates[::-1]):
        (choice,) = rank(order, book, "hybrid")
        assert choice.candidate.name == "twin 1"
        assert choice.tied == ("empty", "lone", "twin 1", "twin 2")
        assert (choice.of, choice.scored) == (4, 0)


def test_a_prediction_has_the_keys_that_swebench_reads() -> None:
    assert prediction(Candidate("t", "a", "p"), model="m") == row("t", "m", "p")


@pytest.mark.parametrize("content", [b"[1,2,3]", b'{"a": 1}', b"\xff\xfe", b'{"a": "cut'])
def test_a_file_that_is_no_scores_is_refused_and_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no score"):
        ScoreBook.open(path)
    assert path.read_bytes() == content


def test_reading_torn_scores_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b'{"task":"a","cand')
    assert not ScoreBook.open(path).rows
    assert path.read_bytes() == b'{"task":"a","cand'


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ('"verifier": "high"', "verifier is a str, not a float"),
        ('"verifier": NaN', "verifier is nan"),
        ('"regression": 1e400', "regression is inf"),
        ('"reproduction": [1]', "reproduction is a list, not an object"),
        ('"reproduction": {"t": "yes"}', r"reproduction\['t'\] is a str, not a bool"),
        ('"task": null', "task is a NoneType"),
    ],
)
def test_a_score_of_the_wrong_kind_is_refused_by_its_name(tmp_path: Path, values: str, said: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"task": "t", "candidate": "c", "patch": "p", ' + values + "}\n")
    with pytest.raises(ConfigError, match=said):
        ScoreBook.open(path)
