"""Which directory a run stands for where a model is asked for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from deepswe.config import ModelConfig
from deepswe.errors import ConfigError
from deepswe.policy.checkpoints import exported_model
from deepswe.policy.model_path import with_model_directory


def checkpoint(run: Path, place: str, step: int, *, model: bool = True, whole: bool = True) -> Path:
    """A checkpoint as a run leaves it; its export, whether it is there or not."""
    path = run / "checkpoints" / place / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    if model:
        (path / "model").mkdir()
    (path / "manifest.json").write_text(json.dumps({"step": step, "sizes": {"state.json": 2 if whole else 3}}))
    return path / "model"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "run", "start", 0)
    checkpoint(tmp_path / "run", "training", 20)
    checkpoint(tmp_path / "run", "training", 30)
    checkpoint(tmp_path / "run", "training", 40, whole=False)
    checkpoint(tmp_path / "run", "imitation", 500)
    return tmp_path / "run"


def test_a_run_stands_for_its_newest_whole_checkpoint_and_step_0_for_its_start(run: Path) -> None:
    places = run / "checkpoints"
    assert exported_model(str(run)) == places / "training" / "step-00000030" / "model"
    assert exported_model(f"{run}@20") == places / "training" / "step-00000020" / "model"
    assert exported_model(f"{run}@0") == places / "start" / "step-00000000" / "model"
    with pytest.raises(ConfigError, match="no checkpoint of step 40; there are: 0, 20, 30"):
        exported_model(f"{run}@40")
    with pytest.raises(ConfigError, match="write RUN@STEP"):
        exported_model(f"{run}@last")


def sealed(run: Path, step: int) -> Path:
    """A checkpoint with hashes, of a model of one file; its export."""
    export = checkpoint(run, "training", step)
    (export / "weights").write_bytes(b"weights")
    sizes = {"state.json": 2, "model/weights": 7}
    kept = {name: hashlib.sha256((export.parent / name).read_bytes()).hexdigest() for name in sizes}
    (export.parent / "manifest.json").write_text(json.dumps({"step": step, "sizes": sizes, "sha256": kept}))
    return export


def test_a_model_whose_bytes_changed_is_refused_by_its_step_and_passed_over_where_none_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = sealed(tmp_path, 1), sealed(tmp_path, 2)
    assert exported_model(str(tmp_path)) == exported_model(f"{tmp_path}@2") == newer
    (newer / "weights").write_bytes(b"weightz")
    with pytest.raises(ConfigError, match=r"step-00000002 is damaged: model/weights has other bytes.*name another"):
        exported_model(f"{tmp_path}@2")
    assert exported_model(str(tmp_path)) == older
    assert f"{newer.parent} is damaged and passed over: model/weights has other bytes" in caplog.text


def test_the_training_has_the_word_where_the_start_is_of_the_same_step(tmp_path: Path) -> None:
    checkpoint(tmp_path, "start", 0)
    assert exported_model(str(tmp_path)) == tmp_path / "checkpoints" / "start" / "step-00000000" / "model"
    trained = checkpoint(tmp_path, "training", 0)
    assert exported_model(str(tmp_path)) == exported_model(f"{tmp_path}@0") == trained


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "training", 1, model=False)
    with pytest.raises(ConfigError, match="holds no model"):
        exported_model(str(tmp_path))


def test_the_path_of_a_model_may_be_a_run(run: Path) -> None:
    config = ModelConfig(path=f"{run}@20", dtype="bfloat16")
    wanted = run / "checkpoints" / "training" / "step-00000020" / "model"
    assert with_model_directory(config) == ModelConfig(path=str(wanted), dtype="bfloat16")
    for path in ("", str(wanted)):
        assert with_model_directory(ModelConfig(path=path)).path == path
    (run / "config.json").write_text("{}")  # a model with directories of its own
    assert with_model_directory(ModelConfig(path=str(run))).path == str(run)
