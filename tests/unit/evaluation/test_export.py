"""What we write for others is read by them, and read back by us."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from deepswe.errors import ConfigError
from deepswe.evaluation.export import (
    choose_attempt,
    predictions,
    write_predictions,
    write_submission,
    write_trajectories,
)
from deepswe.evaluation.export_trajectories import FORMATS, Exporter, parts_of
from deepswe.policy.scripted import ByteRenderer
from deepswe.scaling.candidates import load_candidates
from deepswe.types import Ending, Graded, Message, Step, TokenSpan, ToolCall, Trajectory, Ungraded, Usage

PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b \udcff\n"
TURN = "<think>\nlook\n</think>\n\nI search.\n<function=search>\n<parameter=search_term>x</parameter>\n</function>"
BYTES = ByteRenderer()


def attempt(task: str, number: int = 0, *, patch: str = PATCH, remote: bool = True) -> Trajectory:
    opening = BYTES.opening([Message("system", "You are."), Message("user", "Fix it.")])
    spans = [
        TokenSpan(opening, False),
        TokenSpan((1, 2, 260), True, (-0.5, -0.25, 0.0)),
        TokenSpan(BYTES.observation("found \ud800"), False),
        TokenSpan((3, 260), True, (0.0, 0.0)),
    ]
    steps = (Step(TURN, ToolCall("search", {"search_term": "x"}), "found \ud800"), Step("done?", None, "", "no_call"))
    usage = (Usage(10, 0, 5, 0.25), Usage(20, 10, 5, 0.5)) if remote else ()
    return Trajectory(
        task, number, "eval_heldout_0", 0, tuple(spans), steps, Ending.MAX_STEPS, Graded(1.0), patch,
        tags={"issue": "Fix it."}, usage=usage,
    )  # fmt: skip


REMOTE, LOCAL = Exporter("a-model", True), Exporter("a-model", False)


@pytest.mark.parametrize("name", ["preds.jsonl", "preds.json", "folder"])
def test_predictions_have_all_keys_and_are_read_back(tmp_path: Path, name: str) -> None:
    rows = predictions([attempt("b"), attempt("a", patch="")], model="a-model")
    assert set(rows[0]) == {"instance_id", "model_name_or_path", "model_patch"}
    write_predictions(rows, tmp_path / name)
    if name == "folder":
        files = sorted((tmp_path / name).rglob("*.pred"))
        assert [json.loads(file.read_text())["instance_id"] for file in files] == ["a", "b"]
        return
    loaded, refused = load_candidates(tmp_path / name)
    assert refused == ()
    assert {(c.task_id, c.name, c.patch) for c in loaded} == {("a", "a-model", ""), ("b", "a-model", PATCH)}


def official_reader() -> Any:
    """`get_predictions_from_file` of the installed swebench; its module needs more than is installed."""
    found = importlib.util.find_spec("swebench")
    if found is None or found.origin is None:
        pytest.skip("the swebench package is not installed")
    source = Path(found.origin).with_name("harness") / "utils.py"
    names = "get_predictions_from_file"
    tree = ast.parse(source.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == names]
    space: dict[str, Any] = {"json": json}
    exec(compile(tree, str(source), "exec"), space)
    return space[names]


def test_the_official_reader_reads_our_predictions(tmp_path: Path) -> None:
    read = official_reader()
    rows = predictions([attempt("a"), attempt("b")], model="a-model")
    for name in ("preds.jsonl", "preds.json"):
        write_predictions(rows, tmp_path / name)
        assert sorted(read(str(tmp_path / name), "unused", "test"), key=lambda row: str(row["instance_id"])) == rows


@pytest.mark.parametrize("form", ["swe-agent", "mini-swe-agent"])
def test_trajectories_come_back_as_candidates_with_patch_and_turns(tmp_path: Path, form: str) -> None:
    assert write_trajectories([attempt("a"), attempt("b")], tmp_path / "out", form=form, exporter=REMOTE) == 2
    loaded, refused = load_candidates(tmp_path / "out")
    assert refused == ()
    assert [(c.task_id, c.patch) for c in loaded] == [("a", PATCH), ("b", PATCH)]
    said = [(turn.role, turn.content) for turn in loaded[0].turns]
    assert ("assistant", TURN) in said
    assert ("user", "found \ud800") in said


def test_a_trajectory_of_swe_agent_has_thought_action_and_what_it_cost() -> None:
    record = FORMATS["swe-agent"][1](REMOTE, attempt("a"))
    step = record["trajectory"][0]
    assert step["thought"] == "look\nI search."
    assert step["action"].startswith("<function=search>")
    assert record["info"]["exit_status"] == "exit_steps"
    assert record["info"]["model_stats"] == {
        "instance_cost": 0.75, "tokens_sent": 30, "tokens_received": 10, "api_calls": 2,
    }  # fmt: skip
    assert [row["role"] for row in record["history"]] == ["system", "user", "assistant", "user", "assistant"]


def test_atif_keeps_tokens_of_a_model_and_counts_of_an_endpoint() -> None:
    remote = FORMATS["atif"][1](REMOTE, attempt("a"))
    assert [step["source"] for step in remote["steps"]] == ["system", "user", "agent", "agent"]
    agent = remote["steps"][2]
    assert (agent["reasoning_content"], agent["message"]) == ("look", "I search.")
    assert agent["observation"]["results"][0]["source_call_id"] == agent["tool_calls"][0]["tool_call_id"]
    assert agent["metrics"] == {"prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": 5, "cost_usd": 0.25}
    assert remote["final_metrics"]["total_cost_usd"] == 0.75
    local = FORMATS["atif"][1](LOCAL, attempt("a", remote=False))
    assert local["steps"][1]["metrics"]["completion_token_ids"] == [1, 2, 260]
    assert local["steps"][1]["metrics"]["logprobs"] == [-0.5, -0.25, 0.0]
    assert local["steps"][0]["message"] == "Fix it."


def test_atif_is_what_harbors_own_reader_takes() -> None:
    models = pytest.importorskip("harbor.models.trajectories.trajectory", reason="harbor is not installed")
    for exporter, trajectory in ((REMOTE, attempt("a")), (LOCAL, attempt("a", remote=False))):
        record = json.loads(json.dumps(FORMATS["atif"][1](exporter, trajectory)).replace("\\ud800", "?"))
        models.Trajectory.model_validate(json.loads(json.dumps(record).replace("\\udcff", "?")))


def test_one_attempt_a_task_is_chosen_and_the_rest_is_refused(tmp_path: Path) -> None:
    held = [attempt("b", 1), attempt("a", 1), attempt("a", 0)]
    assert [t.task_id for t in choose_attempt(held, 1)] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"no attempt 2.*0, 1"):
        choose_attempt(held, 2)
    with pytest.raises(ConfigError, match="3 predictions are of 2 tasks"):
        write_predictions(predictions(held, model="m"), tmp_path / "x.jsonl")
    with pytest.raises(ConfigError, match="no trajectory format 'x'"):
        write_trajectories(held, tmp_path, form="x", exporter=REMOTE)


def test_a_submission_has_what_the_leaderboard_asks_for_and_no_logs_of_an_evaluation(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    out = tmp_path / "20260101_ours"
    write_submission([attempt("a"), attempt("b")], out, exporter=REMOTE, name='a "name"', site="here", open_model=True)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "all_preds.jsonl", "metadata.yaml", "trajs"]
    metadata: dict[str, Any] = yaml.safe_load((out / "metadata.yaml").read_text())
    assert metadata["info"] == {"name": 'a "name"', "site": "here"}
    assert metadata["tags"]["os_model"] is True
    assert metadata["tags"]["system"]["attempts"] == "1"
    assert sorted(path.name for path in (out / "trajs").iterdir()) == ["a.traj", "b.traj"]
    assert "100.0% of 2 tasks" in (out / "README.md").read_text()


def test_an_attempt_without_verdict_has_no_score_in_a_readme(tmp_path: Path) -> None:
    failed = Trajectory("a", 0, "p", 0, (), (), Ending.ERROR, Ungraded("away"))
    write_submission([failed], tmp_path / "s", exporter=REMOTE, name="n", site="", open_model=False)
    assert "Graded by" not in (tmp_path / "s" / "README.md").read_text()
    assert parts_of(Step("just words", None, "")) == ("", "just words", "")


@pytest.mark.parametrize("task", ["../../out", "/out", "a/b", "..", "", "a\nb", "a\0b", "\ud800", "x" * 300])
def test_a_task_whose_name_would_leave_the_directory_is_written_nowhere(tmp_path: Path, task: str) -> None:
    out = tmp_path / "deep" / "down" / "out"
    made = [attempt("a"), attempt(task)]
    with pytest.raises(ConfigError, match="cannot name a file"):
        write_trajectories(made, out, form="atif", exporter=REMOTE)
    with pytest.raises(ConfigError, match="cannot name a file"):
        write_submission(made, out, exporter=REMOTE, name="n", site="", open_model=False)
    with pytest.raises(ConfigError, match="cannot name a file"):
        write_predictions(predictions(made, model="m"), out)
    assert list(tmp_path.iterdir()) == []
