import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.training import checkpoint
from deepswe.training.checkpoint import all_checkpoints, latest, save_checkpoint, to_resume
from deepswe.training.learner import Learner


def save(directory, step, *, keep=2, **options):
    return save_checkpoint(
        directory,
        step,
        learner_state={"weight": torch.full((3,), float(step))},
        state={"step": step},
        keep=keep,
        **options,
    )


def test_what_was_saved_comes_back(tmp_path):
    save(tmp_path / "checkpoints", 7)
    found = latest(tmp_path / "checkpoints")
    assert found.step == 7
    assert found.state() == {"step": 7}
    assert found.learner_state()["weight"].tolist() == [7, 7, 7]


def test_no_directory_and_an_empty_one_have_none(tmp_path):
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None


def test_the_newest_few_are_kept_by_step_not_by_name(tmp_path):
    for step in (9, 10, 99_999_999, 100_000_000):
        save(tmp_path, step)
    assert [found.step for found in all_checkpoints(tmp_path)] == [99_999_999, 100_000_000]


def test_a_half_written_checkpoint_is_never_picked(tmp_path):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    learner = newest.path / "learner.pt"
    learner.write_bytes(learner.read_bytes()[:-1])
    assert latest(tmp_path).step == 1
    (latest(tmp_path).path / "manifest.json").unlink()
    assert latest(tmp_path) is None


def flip(path):
    """One bit of the last byte; the size stays."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("name", ["learner.pt", "state.json", "model/config.json"])
def test_a_checkpoint_with_a_flipped_bit_is_passed_over_by_name(tmp_path, caplog, make_model, name):
    save(tmp_path, 1)
    newest = save(tmp_path, 2, model=make_model(torch.float32))
    assert latest(tmp_path).step == 2
    assert caplog.text == ""
    flip(newest.path / name)
    assert latest(tmp_path).step == 1
    assert f"{newest.path} is damaged and passed over: {name} has other bytes than were written" in caplog.text


def test_the_hashes_are_those_of_the_files_and_a_manifest_of_an_earlier_version_without_them_is_read(tmp_path):
    found = save(tmp_path, 1)
    manifest = json.loads((found.path / "manifest.json").read_text())
    assert manifest["sha256"] == {
        name: hashlib.sha256((found.path / name).read_bytes()).hexdigest() for name in ("learner.pt", "state.json")
    }
    del manifest["sha256"]
    (found.path / "manifest.json").write_text(json.dumps(manifest))
    assert latest(tmp_path).learner_state()["weight"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "damaged", ["5", "{}", '{"sizes": 5}', '{"sizes": {"a": "b"}}', '{"sizes": {}, "sha256": 5}', "["]
)
def test_a_damaged_manifest_makes_a_checkpoint_incomplete_and_is_no_failure(tmp_path, caplog, damaged):
    (save(tmp_path, 1).path / "manifest.json").write_text(damaged)
    assert latest(tmp_path) is None
    assert all_checkpoints(tmp_path) == []
    assert "step-00000001 is damaged and passed over" in caplog.text


def test_where_every_checkpoint_is_damaged_nothing_begins_anew(tmp_path):
    assert to_resume(tmp_path) is None
    for step in (1, 2):
        (save(tmp_path, step).path / "learner.pt").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"none of the 2 checkpoints .* move the run's directory away"):
        to_resume(tmp_path)
    save(tmp_path, 3, keep=5)
    assert to_resume(tmp_path).step == 3


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 3)
    save_checkpoint(tmp_path, 3, learner_state={}, state={"second": True}, keep=1)
    assert latest(tmp_path).state() == {"second": True}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_what_a_killed_writer_left_is_swept(tmp_path):
    (tmp_path / ".step-00000004.tmp").mkdir()
    (tmp_path / ".step-00000004.tmp" / "learner.pt").write_bytes(b"half")
    assert latest(tmp_path) is None
    save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_disk_is_one_clear_error_and_leaves_the_previous_one(tmp_path, monkeypatch, call):
    save(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, call, full)
    with pytest.raises(TrainingError, match=r"00002 was not written \(No space left on device\); .*00001 is intact"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert latest(tmp_path).learner_state()["weight"].tolist() == [1, 1, 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_while_tensors_are_written_is_the_same_error(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "_LEARNER", "/dev/full")
    big = {"weight": torch.zeros(1 << 20)}
    with pytest.raises(TrainingError, match="No space left on device"):
        save_checkpoint(tmp_path, 2, learner_state=big, state={}, keep=1)
    assert latest(tmp_path).step == 1


def test_unreadable_state_names_the_checkpoint(tmp_path):
    found = save(tmp_path, 1)
    size = (found.path / "learner.pt").stat().st_size
    (found.path / "learner.pt").write_bytes(b"x" * size)
    with pytest.raises(TrainingError, match=r"step-00000001 cannot be read; remove it to use an older one"):
        found.learner_state()


def test_a_learner_goes_on_from_disk_and_its_model_loads_elsewhere(tmp_path, make_model, make_group):
    def learner(seed):
        config = TrainingConfig(learning_rate=1e-2)
        return Learner(make_model(torch.float32, seed=seed), config, AlgorithmConfig(), max_tokens=100)

    groups = [make_group([1, 0, 0])]
    first = learner(0)
    first.update(groups)
    save_checkpoint(tmp_path, 1, learner_state=first.state_dict(), state={}, keep=1, model=first.model)
    second = learner(1)
    second.load_state_dict(latest(tmp_path).learner_state())
    exported = Qwen3ForCausalLM.from_pretrained(latest(tmp_path).export)
    assert torch.equal(exported.lm_head.weight, first.model.lm_head.weight)
    one, two = first.update(groups), second.update(groups)
    assert {**one, "seconds": 0} == {**two, "seconds": 0}
    assert second.version == 2
    assert json.loads((latest(tmp_path).path / "manifest.json").read_text())["step"] == 1
