from functools import partial

import pytest
import torch
from torch.nn.functional import rms_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MistralConfig, MistralForCausalLM

from deepswe.algorithms.packing import collate, make_samples
from deepswe.algorithms.prefix import collate_tree
from deepswe.config import AlgorithmConfig, LoraAdapters, TrainingConfig
from deepswe.errors import TrainingError
from deepswe.training import forward_rows
from deepswe.training.forward import TokenScorer, checkpoint_layers
from deepswe.training.forward_rows import attend_along
from deepswe.training.learner import Learner
from deepswe.training.lora import add_lora
from deepswe.types import Ending, Graded, TokenSpan, Trajectory


def sharing_group(size=4, prompt=7):
    """Attempts that share a prompt, and two of them the beginning of what they sampled."""
    generator = torch.Generator().manual_seed(1)

    def draw(count):
        return tuple(torch.randint(0, 32, (count,), generator=generator).tolist())

    opening, first = draw(prompt), draw(3)
    group = []
    for number in range(size):
        sampled = (*(first if number < 2 else draw(3)), *draw(2 + number))
        spans = (TokenSpan(opening, False), TokenSpan(sampled, True, (-3.4,) * len(sampled)))
        group.append(Trajectory("t", number, "train", 0, spans, (), Ending.SUBMITTED, Graded(float(number % 2))))
    return group


def exact(model):
    """Norms in the model's own type: those of `transformers` round to float32, in another order for a shared prefix."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=1e-6)
    return model


def gradients(model, batch):
    scores = TokenScorer(model)(batch)
    (scores.logp_N * torch.linspace(-1, 1, len(scores.logp_N), dtype=scores.logp_N.dtype)).sum().backward()
    return scores.logp_N.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.fixture(params=["in parts", "under masks"])
def way(request, monkeypatch):
    """Both ways of attention: that of a CPU, and that of any device."""
    if request.param == "under masks":
        monkeypatch.setattr(forward_rows, "_in_parts", forward_rows._under_masks)
        monkeypatch.setattr(forward_rows, "BLOCK", 3)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_packed_row_gives_the_scores_and_gradients_of_its_samples_alone(make_model, recomputed):
    samples = [sample for trajectory in sharing_group() for sample in make_samples(trajectory, [1.0])]
    wanted = gradients(make_model(), collate(samples))
    model = make_model()
    attend_along(model)
    if recomputed:
        checkpoint_layers(model)
    batch = collate(samples, packed=True)
    found = gradients(model, batch)
    assert batch.tokens_BT.shape == (1, sum(sample.length for sample in samples))
    assert torch.allclose(found[0], wanted[0], atol=1e-12)
    for got, right in zip(found[1], wanted[1], strict=True):
        assert torch.allclose(got, right, atol=1e-10)


def test_a_packed_row_makes_nothing_that_grows_with_the_square_of_its_length(make_model):
    """Of 40 samples of 50 tokens, a mask over the row would have 4 million entries."""
    model = make_model()
    attend_along(model)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            sizes.extend(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor))
            return made

    sample = make_samples(sharing_group(size=1, prompt=45)[0], [1.0])[0]
    with Sizes():
        TokenScorer(model)(collate([sample] * 40, packed=True)).logp_N.sum().backward()
    assert 40 * sample.length * 16 < max(sizes) < 500_000


def test_a_model_with_a_window_is_refused():
    config = MistralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        sliding_window=4,
    )
    with pytest.raises(TrainingError, match="it has layers without full attention"):
        attend_along(MistralForCausalLM(config))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_tree_gives_the_scores_and_gradients_of_whole_sequences(make_model, recomputed):
    samples = [sample for trajectory in sharing_group() for sample in make_samples(trajectory, [1.0])]
    wanted = gradients(exact(make_model()), collate(samples))
    model = exact(make_model())
    attend_along(model)
    if recomputed:
        checkpoint_layers(model)
    batch = collate_tree(samples)
    found = gradients(model, batch)
    assert batch.tokens_BT.shape[1] < sum(sample.length for sample in samples)
    assert torch.allclose(found[0], wanted[0], atol=1e-12)
    for got, right in zip(found[1], wanted[1], strict=True):
        assert torch.allclose(got, right, atol=1e-10)


@pytest.mark.usefixtures("way")
def test_a_tree_under_autocast_gives_the_scores_of_padded_samples_under_autocast(make_model):
    samples = [sample for trajectory in sharing_group() for sample in make_samples(trajectory, [1.0])]
    plain, along = make_model(torch.float32), make_model(torch.float32)
    attend_along(along)
    wanted = TokenScorer(plain, bfloat16=True)(collate(samples)).logp_N
    found = TokenScorer(along, bfloat16=True)(collate_tree(samples)).logp_N
    found.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in along.parameters())
    rounded = (wanted - TokenScorer(plain)(collate(samples)).logp_N).abs().max()
    assert (found - wanted).abs().max() < 3 * rounded


def test_a_model_with_frozen_weights_of_bfloat16_is_taken(make_model):
    model = make_model(torch.float32)
    add_lora(model, LoraAdapters(rank=2), seed=0, narrow=True)
    attend_along(model)


def test_an_update_on_trees_equals_a_padded_one(make_model):
    groups, rows = [sharing_group(prompt=20), sharing_group(size=3, prompt=17)], []
    for packing in ("padded", "tree"):
        training = TrainingConfig(learning_rate=1e-3, packing=packing, tokens_per_microbatch=60)
        algorithm = AlgorithmConfig(normalisation="token_mean")
        learner = Learner(exact(make_model()), training, algorithm, max_tokens=50)
        rows.append(learner.update(groups))
    for name in ("loss", "grad_norm", "entropy", "tokens", "trained_tokens"):
        assert rows[1][name] == pytest.approx(rows[0][name], abs=1e-9)
    assert 0.5 < rows[1]["shared"] < 0.8


def test_a_learner_does_not_share_what_is_too_short_for_it(make_model):
    training = TrainingConfig(packing="tree")
    learner = Learner(make_model(), training, AlgorithmConfig(), max_tokens=50)
    assert learner.update([sharing_group(prompt=8)])["shared"] == 0.0
    assert learner.update([sharing_group(prompt=16)])["shared"] > 0.3


def test_a_model_with_trees_acts_as_before_without_them(make_model):
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    model = make_model().eval()
    before = model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits
    attend_along(model)
    assert torch.equal(model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits, before)


def test_a_model_that_looks_back_in_another_way_is_refused(make_model):
    model = make_model()
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, branches=None, forward=forward, **kwargs: forward(*args, **kwargs)
    with pytest.raises(TrainingError, match=r"cannot take rows of many samples .* set training\.packing"):
        attend_along(model)
