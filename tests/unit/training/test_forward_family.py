from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deepswe.algorithms.packing import collate, make_samples
from deepswe.algorithms.prefix import collate_tree
from deepswe.config import AlgorithmConfig, LoraAdapters, TrainingConfig
from deepswe.training import forward_family, forward_parts
from deepswe.training.forward import TokenScorer, checkpoint_layers
from deepswe.training.forward_family import FamilyForward, serves
from deepswe.training.forward_rows import attend_along
from deepswe.training.learner import Learner
from deepswe.training.lora import add_lora
from deepswe.types import Ending, Graded, TokenSpan, Trajectory

KINDS = {
    "Llama with biases": (LlamaForCausalLM, LlamaConfig, {"mlp_bias": True, "attention_bias": True}),
    "Qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "Qwen3 with tied embeddings": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),
}
COLLATED = {"padded": collate, "packed": partial(collate, packed=True), "tree": collate_tree}


def model_of(kind="Qwen2", dtype=torch.float64, layers=3, **settings):
    torch.manual_seed(0)
    built, config, own = KINDS[kind]
    shape = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 5}
    shape |= {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "initializer_range": 0.2}
    model = built(config(**shape, **own, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def exact(model):
    """Norms in the model's own type: those of `transformers` round to float32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=1e-6)
    return model


def samples(size=5, turns=3):
    """Attempts that share a prompt, with turns between which something is observed."""
    generator = torch.Generator().manual_seed(1)

    def draw(low, high):
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, 32, (count,), generator=generator).tolist())

    opening, made = draw(7, 8), []
    for number in range(size):
        spans = [TokenSpan(opening, False)]
        for _ in range(turns):
            sampled = draw(1, 5)
            spans += [TokenSpan(sampled, True, (-3.4,) * len(sampled)), TokenSpan(draw(2, 9), False)]
        attempt = Trajectory("t", number, "train", 0, tuple(spans), (), Ending.SUBMITTED, Graded(float(number % 2)))
        made += make_samples(attempt, [1.0] * turns)
    return made


def states_and_gradients(states_of, model, batch):
    states_NH, targets_N = states_of(batch)
    upstream_NH = torch.linspace(-1, 2, states_NH.numel(), dtype=states_NH.dtype).view_as(states_NH)
    (states_NH * upstream_NH).sum().backward()
    return states_NH.detach(), targets_N, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("packing", COLLATED)
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_every_gradient_equal_those_of_the_modules(monkeypatch, kind, packing, layers, dtype, bound):
    monkeypatch.setattr(forward_parts, "CUT", 4)
    monkeypatch.setattr(forward_family, "BLOCK", 7)
    batch, made = COLLATED[packing](samples()), []
    for family in (False, True):
        model = exact(model_of(kind, dtype, layers))
        attend_along(model)
        states_of = FamilyForward(model) if family else TokenScorer(model, own_pass=False)._plain_states
        made.append(states_and_gradients(states_of, model, batch))
    (wanted_NH, wanted_N, wanted), (found_NH, found_N, found) = made
    assert torch.equal(found_N, wanted_N)
    assert torch.allclose(found_NH, wanted_NH, atol=bound)
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None
        else:
            assert (found[name] - gradient).abs().max() < bound * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_scorer_goes_this_way_in_float32(kind):
    model, other = model_of(kind, torch.float32), model_of(kind, torch.float32)
    scorer = TokenScorer(model)
    assert scorer._family is not None
    found, wanted = scorer(collate(samples())), TokenScorer(other, own_pass=False)(collate(samples()))
    assert torch.allclose(found.logp_N, wanted.logp_N, atol=1e-5)
    assert torch.allclose(found.entropy_N, wanted.entropy_N, atol=1e-5)


@pytest.mark.parametrize("packing", COLLATED)
def test_a_learner_trains_the_same_weights_either_way(make_group, packing):
    made = []
    for own_pass in (True, False):
        model = exact(model_of("Qwen3 with tied embeddings"))
        learner = Learner(
            model,
            TrainingConfig(learning_rate=1e-2, tokens_per_microbatch=40, packing=packing),
            AlgorithmConfig(kl_coefficient=0.01),
            max_tokens=100,
            own_pass=own_pass,
        )
        rows = [learner.update([make_group([1, 0, 0, 1], seed=seed)]) for seed in range(4)]
        made.append((rows, model.state_dict()))
    (found_rows, found), (wanted_rows, wanted) = made
    for found_row, wanted_row in zip(found_rows, wanted_rows, strict=True):
        assert found_row["loss"] == pytest.approx(wanted_row["loss"], abs=1e-10)
    for name, weight in wanted.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-10), name


def test_a_scorer_that_is_told_its_way_asks_no_more(monkeypatch):
    batch, taken = collate(samples()), []
    along = FamilyForward.along
    monkeypatch.setattr(FamilyForward, "along", lambda self, course: taken.append(1) or along(self, course))
    TokenScorer(model_of(dtype=torch.float64), own_pass=True)(batch)
    assert len(taken) == 1
    TokenScorer(model_of(dtype=torch.float32), own_pass=False)(batch)
    TokenScorer(model_of(dtype=torch.float64))(batch)
    assert len(taken) == 1


def test_frozen_weights_get_no_gradient_and_the_others_theirs():
    batch, made = collate(samples()), []
    for family in (False, True):
        model = exact(model_of("Qwen3 with tied embeddings"))
        model.model.layers[0].requires_grad_(False)
        model.model.layers[1].self_attn.q_norm.requires_grad_(False)
        states_of = FamilyForward(model) if family else TokenScorer(model, own_pass=False)._plain_states
        made.append(states_and_gradients(states_of, model, batch)[2])
    for name, gradient in made[0].items():
        assert (made[1][name] is None) == (gradient is None), name
        assert gradient is None or torch.allclose(made[1][name], gradient, atol=1e-10)


def test_a_second_derivative_is_refused():
    model = model_of()
    weight = model.model.layers[1].mlp.up_proj.weight
    states_NH, _ = FamilyForward(model)(collate(samples()))
    (first,) = torch.autograd.grad(states_NH.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_scores_without_gradients_are_the_same():
    scorer, batch = TokenScorer(model_of(dtype=torch.float32)), collate(samples())
    with torch.no_grad():
        scores = scorer(batch)
    assert not scores.logp_N.requires_grad
    assert torch.equal(scores.logp_N, scorer(batch).logp_N.detach())


def hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def hooked_backward(model):
    model.model.layers[1].mlp.register_full_backward_hook(lambda *_: None)


def mapped_otherwise(model):
    class Other(nn.Linear):
        pass

    model.model.layers[1].mlp.up_proj.__class__ = Other


def dropping_out(model):
    model.config.attention_dropout = 0.1
    model.train()


REFUSED = {
    "hooked": hooked,
    "hooked in the backward pass": hooked_backward,
    "with another map": mapped_otherwise,
    "with recomputed layers": checkpoint_layers,
    "with exchanged norms": exact,
    "with adapters": lambda model: add_lora(model, LoraAdapters(rank=2), seed=0),
    "dropping out": dropping_out,
    "in float64": lambda model: model.double(),
    "in bfloat16": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("change", REFUSED)
def test_the_plain_way_stays_for_a_model(change):
    model = model_of(dtype=torch.float32)
    assert serves(model)
    REFUSED[change](model)
    assert not serves(model)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_of_the_row_go_the_plain_way(rope):
    scaled = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    more = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]} if rope == "longrope" else {}
    assert not serves(model_of(dtype=torch.float32, rope_parameters=scaled | more, max_position_embeddings=32))


@pytest.mark.parametrize("kind", ["Llama with biases", "Qwen2"])
def test_scoring_leaves_the_weights_as_they_are_also_where_a_head_is_one_pair(kind):
    model = model_of(kind, dtype=torch.float32, head_dim=2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    TokenScorer(model)(collate(samples())).logp_N.sum().backward()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_model_that_is_changed_later_goes_the_plain_way_from_then_on():
    model = model_of(dtype=torch.float32)
    scorer, batch = TokenScorer(model), collate(samples())
    before = scorer(batch).logp_N.detach()
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(scorer(batch).logp_N.detach(), before, atol=1e-5)
    assert seen


def test_autocast_goes_the_plain_way():
    model = model_of(dtype=torch.float32)
    assert TokenScorer(model, bfloat16=True)._family is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not serves(model)


@pytest.mark.parametrize(
    "model",
    [
        GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=64)),
        MistralForCausalLM(
            MistralConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                sliding_window=None,
            )
        ),
        model_of(dtype=torch.float32, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ],
    ids=["another architecture", "a relative", "a window"],
)
def test_other_models_go_the_plain_way(model):
    assert not serves(model)
    assert TokenScorer(model)._family is None


def test_a_model_that_computes_something_else_goes_the_plain_way(monkeypatch):
    model = model_of(dtype=torch.float32)
    monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda self, states, **_: states)
    assert serves(model)
    assert TokenScorer(model)._family is None
