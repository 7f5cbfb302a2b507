import pytest
import torch

from deepswe.config import AlgorithmConfig, LoraAdapters, TrainingConfig
from deepswe.errors import ConfigError
from deepswe.training.checkpoint_export import export_model, is_plain, whole_weights
from deepswe.training.learner import Learner
from deepswe.training.lora import add_lora

pytest.importorskip("peft")

TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def trained(make_model, make_group, **lora):
    model = make_model(torch.float32)
    add_lora(model, LoraAdapters(rank=2, **lora), seed=0)
    learner = Learner(model, TrainingConfig(learning_rate=0.05), AlgorithmConfig(), max_tokens=100)
    learner.update([make_group([1, 0, 0, 1])])
    return model


def test_a_model_with_new_adapters_acts_as_before_and_stays_its_class(make_model):
    model = make_model(torch.float32)
    before, kind = logits(model), type(model)
    add_lora(model, LoraAdapters(rank=2), seed=0)
    assert torch.equal(logits(model), before)
    assert type(model) is kind


def test_only_adapters_move(make_model, make_group):
    frozen, model = dict(make_model(torch.float32).named_parameters()), trained(make_model, make_group)
    for name, value in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(value, frozen[name.replace(".base_layer.", ".")])
    assert not torch.equal(logits(model), logits(make_model(torch.float32)))


def test_exported_weights_are_those_of_a_plain_model_that_acts_alike(make_model, make_group, tmp_path):
    model = trained(make_model, make_group, alpha=3.0)
    plain = make_model(torch.float32)
    missing = plain.load_state_dict(dict(whole_weights(model)), strict=False)
    assert not missing.unexpected_keys
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)
    export_model(model, None, tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)
    assert is_plain(loaded)
    assert not is_plain(model)


def test_frozen_weights_can_be_narrow_while_adapters_stay_wide(make_model):
    model = make_model(torch.float32)
    add_lora(model, LoraAdapters(rank=2, targets=("q_proj",)), seed=0, narrow=True)
    kinds = {name: value.dtype for name, value in model.named_parameters()}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {torch.bfloat16}
    assert all("q_proj" in name for name in kinds if "lora_" in name)


def test_a_target_that_no_layer_has_is_refused(make_model):
    with pytest.raises(ConfigError, match=r"model\.lora\.targets \('nowhere',\) do not fit"):
        add_lora(make_model(torch.float32), LoraAdapters(rank=2, targets=("nowhere",)), seed=0)
