import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepswe.config import AlgorithmConfig, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.training.checkpoint import latest
from deepswe.training.checkpoint_export import whole_weights
from deepswe.training.checkpoint_sharded import load_sharded, save_sharded
from deepswe.training.learner import Learner
from deepswe.training.sharded import Shards, open_shards
from deepswe.training.sharded_leader import LeadingLearner, Orders

ROOT = Path(__file__).parents[3]
COLUMNS = ("loss", "grad_norm", "entropy", "ratio", "clip_low", "clip_high", "advantage_std", "tokens", "updates")


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def made(kind, model, **options):
    training = TrainingConfig(learning_rate=1e-2, tokens_per_microbatch=40, activation_checkpointing=True)
    return kind(model, training, AlgorithmConfig(kl_coefficient=0.01), max_tokens=100, **options)


class Two(Shards):
    """One of two processes, without the other."""

    rank = property(lambda self: self.place)
    size = property(lambda self: 2)

    def __init__(self, place):
        object.__setattr__(self, "place", place)

    __slots__ = ("place",)


def test_every_process_has_as_many_micro_batches_and_together_they_are_all():
    shares = [Two(place).share([1, 2, 3, 4, 5], lambda item: -item) for place in (0, 1)]
    assert shares == [[1, 3, 5], [2, 4, -5]]


def test_sharded_training_with_recomputed_layers_equals_plain_training(make_model, make_group, tmp_path):
    batches = [[make_group([1, 0, 0, 1], seed=seed), make_group([0, 1], seed=seed + 9)] for seed in range(3)]
    plain = Learner(
        make_model(torch.float32),
        TrainingConfig(learning_rate=1e-2),
        AlgorithmConfig(kl_coefficient=0.01),
        max_tokens=100,
    )
    wanted = [plain.update(batch) for batch in batches]
    with open_shards() as shards:
        learner = made(LeadingLearner, make_model(torch.float32), shards=shards, orders=Orders())
        rows = [learner.update(batches[0])]
        saved = learner.save(tmp_path, 1, state={"step": 1}, keep=1, tokenizer=None)
        rows += [learner.update(batch) for batch in batches[1:]]
        weights = {name: weight.clone() for name, weight in learner.weights()}
        with pytest.raises(TrainingError, match="keeps its present weights"):
            learner.set_start({})
        # The same steps from the checkpoint, by a learner that begins elsewhere.
        again = made(Learner, make_model(torch.float32, seed=5), shards=shards)
        again._start = learner._start
        load_sharded(saved, learner=again, shards=shards)
        assert again.version == 1
    for row, right in zip(rows, wanted, strict=True):
        for name in COLUMNS:
            assert row[name] == pytest.approx(right[name], abs=1e-6), name
    own = dict(plain.model.named_parameters())
    assert weights.keys() == own.keys()
    assert max(float((weights[name] - own[name]).detach().abs().max()) for name in own) < 1e-5
    assert latest(tmp_path).state() == {"step": 1}


def test_a_checkpoint_of_one_process_is_refused_with_what_to_do(make_model, make_group, tmp_path):
    with open_shards() as shards:
        learner = made(Learner, make_model(torch.float32), shards=shards)
        checkpoint = save_sharded(tmp_path, 3, learner=learner, shards=shards, state={}, keep=1)
        names = {name for name, _ in whole_weights(learner.model)}
        assert names == {name for name, _ in make_model(torch.float32).named_parameters()}
        (checkpoint.path / "shards").rename(checkpoint.path / "elsewhere")
        with pytest.raises(TrainingError, match="in one process; resume it with one, or start from its export"):
            load_sharded(checkpoint, learner=learner, shards=shards)


def test_what_needs_a_whole_batch_in_one_process_is_refused(make_model):
    with open_shards() as shards, pytest.raises(TrainingError, match="train in one"):
        Learner(make_model(torch.float32), TrainingConfig(), AlgorithmConfig(whiten=True), max_tokens=9, shards=shards)


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/sharded.py"), "--quick"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
