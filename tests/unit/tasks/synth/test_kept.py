"""Micro tasks are made once, are the same out of the cache, and one is made without the others."""

from pathlib import Path

import pytest

from deepswe.config import MicroTasks
from deepswe.errors import TaskError
from deepswe.progress import Silent
from deepswe.tasks.layers import LayerCache
from deepswe.tasks.synth.micro import kept
from deepswe.tasks.synth.micro.generate import micro_task, named_micro_task
from deepswe.tasks.synth.micro.making import micro_task_set

CONFIG = MicroTasks(train=8, heldout=3, unseen=2, seed=5)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "WORTH_KEEPING", 1)


@pytest.mark.usefixtures("few")
def test_a_set_out_of_the_cache_is_the_one_that_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LayerCache(tmp_path)
    made = kept.kept_micro_task_set(CONFIG, cache, Silent())
    assert made == micro_task_set(CONFIG)
    monkeypatch.setattr(kept, "micro_task_set", lambda config, progress: pytest.fail("it was made again"))
    assert kept.kept_micro_task_set(CONFIG, cache, Silent()) == made


@pytest.mark.usefixtures("few")
def test_other_settings_are_another_set_and_a_changed_file_is_made_anew(tmp_path: Path) -> None:
    cache = LayerCache(tmp_path)
    made = kept.kept_micro_task_set(CONFIG, cache, Silent())
    other = CONFIG.model_copy(update={"seed": 6})
    assert kept.kept_micro_task_set(other, cache, Silent()) == micro_task_set(other) != made
    file = cache.path(kept.micro_key(CONFIG)) / kept.FILE
    file.write_bytes(file.read_bytes().replace(b"return", b"retorn"))
    assert kept.kept_micro_task_set(CONFIG, cache, Silent()) == made
    assert kept.kept_micro_task_set(CONFIG, cache, Silent()) == made


@pytest.mark.usefixtures("few")
def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert kept.kept_micro_task_set(CONFIG, LayerCache(tmp_path / "file"), Silent()) == micro_task_set(CONFIG)


def test_one_task_is_made_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    many = CONFIG.model_copy(update={"train": 10**7})
    assert named_micro_task(many, "micro-train-00007") == micro_task("train", 7, seed=5)
    assert named_micro_task(many, "micro-train-1234567") == micro_task("train", 1234567, seed=5)


@pytest.mark.parametrize(
    "name",
    ["micro-train-00008", "micro-train-7", "micro-train-000007", "micro-none-00000", "micro-train-0000٧", "", "x"],
)
def test_a_task_that_the_set_has_not_is_refused_with_those_that_it_has(name: str) -> None:
    with pytest.raises(TaskError, match="micro-train-00000 to micro-train-00007, micro-heldout-00000 to"):
        named_micro_task(CONFIG, name)
