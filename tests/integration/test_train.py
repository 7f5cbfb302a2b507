"""The whole job, small: recipe to report; stopped anywhere and resumed, it gives the same numbers to the last digit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepswe.config import Recipe, build_recipe
from deepswe.errors import ConfigError, RunError
from deepswe.policy.checkpoints import exported_model
from deepswe.progress import Silent
from deepswe.rollout.store import TrajectoryStore
from deepswe.session.looking import count_tasks, task_text
from deepswe.session.outputs import write_outputs
from deepswe.session.rollouts import run_rollouts
from deepswe.session.train import run_recipe
from deepswe.training.metrics import read_rows

SMALL = {"hidden_size": 32, "layers": 2, "heads": 2, "key_value_heads": 1, "intermediate_size": 64, "vocabulary": 600}
MEASURES = {"seconds", "time_s", "rollout_s", "learner_s", "grade_runs", "grade_reused"}


def lake(directory: Path, **run: Any) -> Recipe:
    return build_recipe(
        {
            "run": {"name": "lake", "directory": str(directory), "deterministic": True, "threads": 1, **run},
            "model": {"scratch": SMALL},
            "tasks": {"kind": "frozenlake", "train": 64, "heldout": 6, "max_size": 3, "observation": "relational"},
            "rollout": {
                "tasks_per_step": 2, "group_size": 4, "max_steps": 3, "max_tokens": 200, "max_turn_tokens": 3,
                "concurrency": 4,
            },
            "algorithm": {"drop_uniform_groups": False, "endings": {"max_steps": {"train": True, "baseline": True}}},
            "imitation": {"steps": 4, "trajectories": 8, "batch_size": 4, "learning_rate": 1e-3},
            "training": {"steps": 4, "learning_rate": 1e-3, "checkpoint_every": 2, "updates_per_step": 2},
            "evaluation": {"attempts": 2, "every": 2},
        },
        origin="test",
    )  # fmt: skip


def micro(directory: Path) -> Recipe:
    return build_recipe(
        {
            "run": {"name": "micro", "directory": str(directory), "threads": 1},
            "model": {"scratch": SMALL},
            "tasks": {"kind": "micro", "train": 6, "heldout": 3, "unseen": 0},
            "agent": {"prompt": "brief"},
            "rollout": {
                "tasks_per_step": 2, "group_size": 2, "max_steps": 3, "max_tokens": 400, "max_turn_tokens": 24,
            },
            "imitation": {"steps": 2, "trajectories": 6, "batch_size": 3},
            "training": {"steps": 1, "learning_rate": 1e-3},
            "evaluation": {"attempts": 1},
        },
        origin="test",
    )  # fmt: skip


class Stopped(Exception):
    pass


class StopsAfter(Silent):
    """A progress that stops the run after so many pieces of work, wherever that is."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces

    def advance(self, pieces: int = 1, note: str = "") -> None:
        self.left -= 1
        if self.left < 0:
            raise Stopped


def numbers(run: Path) -> list[dict[str, Any]]:
    rows = [{k: v for k, v in row.items() if k not in MEASURES} for row in read_rows(run / "metrics.jsonl")]
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    run_recipe(lake(directory), resume=False, progress=Silent())
    return directory / "lake"


def test_a_recipe_ends_in_a_report_and_a_summary(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert {"pass_at_1_before", "pass_at_1_after", "difference", "ci95", "tasks", "attempts"} <= summary.keys()
    assert sum(summary["endings"].values()) == sum(summary["grades"].values()) == 4 * 8 + 3 * 12
    assert summary["steps"] == 4
    assert (undisturbed / "report.html").stat().st_size > 10_000
    assert (undisturbed / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert exported_model(str(undisturbed)) == undisturbed / "checkpoints" / "training" / "step-00000004" / "model"
    for step in (0, 4):
        assert (exported_model(f"{undisturbed}@{step}") / "config.json").exists()


def test_the_same_seed_gives_the_same_numbers_also_profiled_and_another_seed_others(
    undisturbed: Path, tmp_path: Path
) -> None:
    run_recipe(lake(tmp_path / "same"), resume=False, progress=Silent(), profile=True)
    assert numbers(tmp_path / "same" / "lake") == numbers(undisturbed)
    profile = json.loads((tmp_path / "same" / "lake" / "profile.json").read_text())
    assert min(profile["model_s"], profile["learner_s"], profile["ours_s"]) > 0
    parts = sum(profile[f"{part}_s"] for part in ("model", "learner", "sandbox", "ours"))
    assert parts == pytest.approx(profile["wall_s"])
    assert 0 < profile["loop_beside_s"] <= profile["loop_s"]
    assert 0 < profile["waited_s"] < profile["wall_s"]
    run_recipe(lake(tmp_path / "other", seed=1), resume=False, progress=Silent())
    assert numbers(tmp_path / "other" / "lake") != numbers(undisturbed)


@pytest.mark.parametrize("pieces", [3, 17, 29, 45])
def test_stopped_anywhere_and_resumed_the_numbers_are_the_same(pieces: int, undisturbed: Path, tmp_path: Path) -> None:
    stops = 0
    for attempt in range(3):
        try:
            run_recipe(lake(tmp_path), resume=attempt > 0, progress=StopsAfter(pieces))
        except (Stopped, BaseExceptionGroup):
            stops += 1
    assert stops >= 1
    run_recipe(lake(tmp_path), resume=True, progress=Silent())
    assert numbers(tmp_path / "lake") == numbers(undisturbed)
    keys = [t.key for t in TrajectoryStore(tmp_path / "lake").read()]
    assert sorted(keys) == sorted(t.key for t in TrajectoryStore(undisturbed).read())
    assert len(keys) == len(set(keys))


def test_a_finished_run_is_not_run_again(undisturbed: Path) -> None:
    before = (undisturbed / "metrics.jsonl").read_bytes()
    assert run_recipe(lake(undisturbed.parent), resume=True, progress=Silent()) == undisturbed / "report.html"
    assert (undisturbed / "metrics.jsonl").read_bytes() == before
    with pytest.raises(RunError, match="--resume"):
        run_recipe(lake(undisturbed.parent), resume=False, progress=Silent())
    assert write_outputs(undisturbed) == undisturbed / "report.html"


def test_micro_tasks_run_through_real_sandboxes_and_every_attempt_is_graded(tmp_path: Path) -> None:
    run_recipe(micro(tmp_path), resume=False, progress=Silent())
    trained = [t for t in TrajectoryStore(tmp_path / "micro").read() if t.phase != "imitation"]
    assert len(trained) == 4 + 3 + 3
    assert all(t.reward is not None for t in trained)
    rows = read_rows(tmp_path / "micro" / "metrics.jsonl")
    assert sum(row.get("grade_runs", 0) + row.get("grade_reused", 0) for row in rows) == len(trained)


def test_the_reference_solver_earns_every_reward_and_the_no_op_none(tmp_path: Path) -> None:
    for actor, wanted in (("reference", 1.0), ("noop", 0.0)):
        recipe = micro(tmp_path / actor)
        guessing = recipe.imitation.model_copy(update={"mistakes": 1.0})  # in what is imitated, and nowhere else
        recipe = recipe.model_copy(update={"imitation": guessing})
        row = run_rollouts(recipe, actor=actor, split="train", attempts=1, limit=4, resume=False, progress=Silent())  # type: ignore[arg-type]
        assert row["pass_at_1"] == wanted
        assert row["attempts"] == 4


def test_tasks_can_be_counted_and_read(tmp_path: Path) -> None:
    assert count_tasks(micro(tmp_path), progress=Silent()) == {"train": 6, "heldout": 3}
    assert ".py" in task_text(micro(tmp_path), "micro-train-00001")
    with pytest.raises(ConfigError, match="no task 'nothing'"):
        task_text(micro(tmp_path), "nothing")


def test_a_split_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tasks of the split 'nowhere'; it has train, heldout"):
        run_rollouts(
            micro(tmp_path), actor="noop", split="nowhere", attempts=1, limit=0, resume=False, progress=Silent()
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is seen")
def test_a_training_for_a_gpu_says_once_that_there_is_none(tmp_path: Path) -> None:
    said: list[str] = []

    class Heard(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    short = lake(tmp_path)
    changes = {"imitation": {"steps": 0}, "training": {"steps": 1}, "cluster": {"gpu": "l40s"}}
    run_recipe(build_recipe({**short.model_dump(), **changes}, origin="test"), resume=False, progress=Heard())
    assert [text for text in said if "GPU" in text] == [
        "note: no GPU is seen, but cluster.gpu is l40s: everything in this process runs on the CPU"
    ]
