"""A recipe takes from a set what may be trained on, and splits it by repository."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepswe.config import TaskSetTasks, build_recipe
from deepswe.envs.suites import check_runnable
from deepswe.errors import ConfigError, TaskError
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.select import select_tasks
from deepswe.tasks.task import HiddenTests, Image, Measured, Repository, Task, TaskSet


def config(**more: Any) -> TaskSetTasks:
    return TaskSetTasks(path=Path("set.parquet"), **more)


def set_of(*tasks: Task, verdict: str = "sound", runtime_s: float = 1.0) -> TaskSet:
    hidden = {task.id: HiddenTests(task.id, {}, ("t.py::a",), ()) for task in tasks}
    return TaskSet(tasks, hidden, {task.id: Measured(verdict, runtime_s=runtime_s) for task in tasks})  # type: ignore[arg-type]


def plain(name: str, repo: str = "r", **more: Any) -> Task:
    return Task(
        **{
            "id": name,
            "repo": repo,
            "problem_statement": "x",
            "repository": Repository(),
            "source": "own",
            "split": "train",
            **more,
        }
    )  # type: ignore[arg-type]


def ids(tasks: TaskSet) -> list[str]:
    return [task.id for task in tasks.tasks]


def test_only_sound_tasks_are_taken_and_unvalidated_ones_on_request() -> None:
    tasks = set_of(plain("a"), plain("b"), plain("c"))
    tasks = replace(tasks, measured={"a": Measured("sound"), "b": Measured("flaky")})
    assert ids(select_tasks(tasks, config())) == ["a"]
    assert ids(select_tasks(tasks, config(unvalidated=True))) == ["a", "c"]
    with pytest.raises(ConfigError, match=r"none of the 1 tasks of .* was validated"):
        select_tasks(set_of(plain("a"), verdict=""), config())


def test_filters_by_repository_difficulty_and_runtime() -> None:
    tasks = set_of(plain("a", "x", tags={"difficulty": "easy"}), plain("b", "y", tags={"difficulty": "hard"}))
    tasks = replace(tasks, measured={"a": Measured("sound", runtime_s=1), "b": Measured("sound", runtime_s=9)})
    assert ids(select_tasks(tasks, config(repositories=["y"]))) == ["b"]
    assert ids(select_tasks(tasks, config(difficulties=["easy"]))) == ["a"]
    assert ids(select_tasks(tasks, config(max_runtime_s=5))) == ["a"]
    assert ids(select_tasks(tasks, config(limit=1))) == ["a"]
    with pytest.raises(ConfigError, match="leave none of the 2 tasks"):
        select_tasks(tasks, config(difficulties=["medium"]))
    with pytest.raises(ConfigError, match="no task of the repository 'z'; it has x, y"):
        select_tasks(tasks, config(repositories=["z"]))


def test_splits_are_of_whole_repositories() -> None:
    tasks = set_of(*(plain(f"{repo}{number}", repo) for repo in "abcdefgh" for number in range(3)))
    for chosen in (config(heldout=["c"]), config(heldout_share=0.25), config(heldout_share=0.25, seed=1)):
        selected = select_tasks(tasks, chosen)
        splits = {(task.repo, task.split) for task in selected.tasks}
        assert len(splits) == 8
        assert sum(split == "heldout" for _, split in splits) == (1 if chosen.heldout else 2)
        assert select_tasks(tasks, chosen) == selected


def test_a_repository_in_two_splits_is_refused() -> None:
    tasks = set_of(plain("a", "r"), plain("b", "r", split="heldout"))
    with pytest.raises(TaskError, match="repository r is in the splits heldout, train"):
        select_tasks(tasks, config())


@pytest.mark.parametrize(
    "task", [plain("a", "own/x", evaluation=True), plain("a", "PyCQA/pylint")], ids=["mark", "name"]
)
def test_training_on_a_benchmark_is_refused_unless_allowed(task: Task) -> None:
    with pytest.raises(ConfigError, match="allow_contaminated"):
        select_tasks(set_of(task), config())
    assert ids(select_tasks(set_of(task), config(allow_contaminated=True))) == ["a"]
    assert ids(select_tasks(set_of(replace(task, split="test")), config())) == ["a"]


def test_that_it_was_allowed_is_in_the_resolved_recipe() -> None:
    tree = {"run": {"name": "x"}, "tasks": {"kind": "taskset", "path": "set.parquet", "allow_contaminated": True}}
    assert '"allow_contaminated":true' in build_recipe(tree, origin="t").model_dump_json()


def test_a_backend_that_cannot_run_a_task_is_told_at_load(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path)
    with pytest.raises(ConfigError, match="bubblewrap has no images"):
        check_runnable(set_of(plain("a", image=Image("i"))), "bubblewrap", cache)
    check_runnable(set_of(plain("a", image=Image("i"))), "docker", cache)
    with pytest.raises(ConfigError, match="layer base-x of task a is not in the cache"):
        check_runnable(set_of(plain("a", repository=Repository(base="base-x"))), "docker", cache)
    with pytest.raises(ConfigError, match="pods run on others"):
        check_runnable(set_of(plain("a", repository=Repository(environment="env-x"))), "kubernetes", cache)
