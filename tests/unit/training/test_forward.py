import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from deepswe.algorithms.packing import collate, make_samples
from deepswe.errors import TrainingError
from deepswe.training import forward
from deepswe.training.forward import TokenScorer, ValueHead


def batch_of(group):
    return collate([sample for trajectory in group for sample in make_samples(trajectory, [1.0, 1.0])])


def by_hand(model, group, temperature=1.0):
    """Each trajectory alone, through the whole model."""
    logps = []
    for trajectory in group:
        tokens = torch.tensor([t for span in trajectory.spans for t in span.tokens])
        sampled = [span.sampled for span in trajectory.spans for _ in span.tokens]
        logp = (model(input_ids=tokens[None]).logits[0] / temperature).log_softmax(-1)
        logps += [logp[i - 1, tokens[i]] for i in range(len(tokens)) if sampled[i]]
    return torch.stack(logps)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padded_batch_scores_equal_single_forward_passes(make_model, make_group, temperature):
    model, group = make_model().eval(), make_group([1, 0, 0, 1])
    scores = TokenScorer(model, temperature=temperature)(batch_of(group))
    assert torch.allclose(scores.logp_N, by_hand(model, group, temperature), atol=1e-10)


def test_chunks_of_the_head_change_neither_values_nor_gradients(make_model, make_group, monkeypatch):
    group = make_group([1, 0, 0, 1])
    gradients = []
    for limit in (1 << 25, 3 * 32):
        monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", limit)
        model = make_model().eval()
        scores = TokenScorer(model)(batch_of(group))
        scores.logp_N.square().sum().backward()
        gradients.append((scores.logp_N.detach(), model.lm_head.weight.grad))
    assert torch.allclose(gradients[0][0], gradients[1][0], atol=1e-12)
    assert torch.allclose(gradients[0][1], gradients[1][1], atol=1e-10)


def test_a_model_that_scales_its_logits_is_scored_by_its_own_logits(make_model, make_group):
    class Scaled(type(make_model())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 0.5 * output.logits
            return output

    model, group = make_model().eval(), make_group([1, 0])
    model.__class__ = Scaled
    scores = TokenScorer(model)(batch_of(group))
    assert torch.allclose(scores.logp_N, by_hand(model, group), atol=1e-10)


def test_another_architecture_needs_nothing_of_its_own(make_group):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    model, group = GPT2LMHeadModel(config).double().eval(), make_group([1, 0, 1])
    assert torch.allclose(TokenScorer(model)(batch_of(group)).logp_N, by_hand(model, group), atol=1e-10)


def test_entropy_is_that_of_the_whole_distribution(make_model, make_group):
    model, group = make_model().eval(), make_group([1])
    with torch.no_grad():
        model.lm_head.weight.zero_()
    entropy = TokenScorer(model)(batch_of(group)).entropy_N
    assert torch.allclose(entropy, torch.full_like(entropy, 32.0).log())
    assert not entropy.requires_grad


def test_a_model_without_a_head_is_refused():
    with pytest.raises(TrainingError, match="Linear has no output embeddings; use a causal language model"):
        TokenScorer(nn.Linear(2, 2))


def test_the_entropy_has_a_gradient_only_where_it_is_asked_for(make_model, make_group):
    model, batch = make_model().eval(), batch_of(make_group([1, 0]))
    assert not TokenScorer(model)(batch).entropy_N.requires_grad
    assert TokenScorer(model, entropy_gradient=True)(batch).entropy_N.requires_grad


def test_values_are_linear_in_the_hidden_state_before_each_token(make_model, make_group):
    model, group = make_model().eval(), make_group([1])
    head = ValueHead.on(model)
    assert TokenScorer(model, values=head)(batch_of(group)).value_N.tolist() == [0.0] * group[0].sampled_length
    nn.init.ones_(head.weight)
    value_N = TokenScorer(model, values=head)(batch_of(group)).value_N
    tokens = torch.tensor([t for span in group[0].spans for t in span.tokens])
    hidden = model.model(input_ids=tokens[None]).last_hidden_state[0]
    assert float(value_N[0].detach()) == pytest.approx(float(hidden[3].detach().sum()))  # four tokens of prompt
