"""A recipe's sampler reaches the training loop as weights of the training tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deepswe.config import MicroTasks, build_recipe
from deepswe.envs.suites import OpenSuite, open_suite
from deepswe.progress import Silent
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.task import Measured, TaskSet
from deepswe.tasks.taskset import save_task_set
from deepswe.training.loop import choose_tasks


def open_weights(path: Path, sampler: dict[str, object]) -> tuple[OpenSuite, list[str]]:
    recipe = build_recipe(
        {"run": {"name": "s"}, "tasks": {"kind": "taskset", "path": str(path), "sampler": sampler}}, origin="test"
    )

    async def work() -> tuple[OpenSuite, list[str]]:
        async with open_suite(recipe, Silent()) as opened:
            return opened, [task.id for task in opened.suite.split("train")]

    return asyncio.run(work())


def test_band_of_a_recipe_leaves_out_what_is_too_easy_or_too_hard_and_only_sound_tasks_train(tmp_path: Path) -> None:
    micro = micro_task_set(MicroTasks(train=5, heldout=0, unseen=0))
    ids = [task.id for task in micro.tasks]
    rates = [(4, 0), (4, 1), (4, 2), (4, 4)]
    measured = {ident: Measured("sound", attempts=a, solved=s) for ident, (a, s) in zip(ids, rates, strict=False)}
    measured[ids[4]] = Measured("flaky", "one test changes", attempts=4, solved=2)
    path = tmp_path / "set.jsonl"
    save_task_set(TaskSet(micro.tasks, micro.hidden, measured), path)
    opened, train = open_weights(path, {"scheme": "band", "low": 0.1, "high": 0.9})
    assert train == ids[:4]
    assert opened.weights == (0.0, 1.0, 1.0, 0.0)
    tasks = opened.suite.split("train")
    chosen = {
        t.id for step in range(4) for t in choose_tasks(tasks, count=1, step=step, seed=0, weights=opened.weights)
    }
    assert chosen == {ids[1], ids[2]}
    assert open_weights(path, {"scheme": "inverse"})[0].weights == (1.0, 0.75, 0.5, 0.05)
