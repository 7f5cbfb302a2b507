import pytest
import torch
from torch import nn

from deepswe.training.forward_head import is_plain, score_by_head


def drawn(dtype=torch.float64, count=23, width=8, vocabulary=40):
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary, width, generator=generator, dtype=dtype))
    hidden = torch.randn(count, width, generator=generator, dtype=dtype)
    return head, hidden, torch.randint(0, vocabulary, (count,), generator=generator)


def whole(head, hidden, targets, temperature):
    logp = (head(hidden).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", [1, 7, 23, 100])
def test_scores_and_gradients_equal_those_of_the_whole_logits(temperature, rows):
    head, hidden, targets = drawn()
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    found = []
    for score in (
        lambda h: score_by_head(head, h, targets, temperature=temperature, rows=rows),
        lambda h: whole(head, h, targets, temperature),
    ):
        leaf = hidden.clone().requires_grad_()
        head.weight.grad = None
        logp, entropy = score(leaf)
        (logp * upstream).sum().backward()
        found.append((logp.detach(), entropy.detach(), leaf.grad, head.weight.grad))
    for ours, wanted in zip(*found, strict=True):
        assert torch.allclose(ours, wanted, atol=1e-12)


def test_the_closed_form_is_the_gradient_by_finite_differences():
    head, hidden, targets = drawn(count=4, width=3, vocabulary=5)

    def scored(hidden):
        return score_by_head(head, hidden, targets, temperature=1.3, rows=3)[0]

    assert torch.autograd.gradcheck(scored, (hidden.requires_grad_(),))


def test_logits_of_minus_infinity_leave_the_entropy_a_number():
    head, hidden, targets = drawn()
    with torch.no_grad():
        head.weight[5] *= float("1e300")
    entropy = score_by_head(head, hidden, targets, temperature=1.0, rows=9)[1]
    assert torch.isfinite(entropy).all()


def test_under_autocast_the_products_are_in_bfloat16_and_the_softmax_in_float32():
    head, hidden, targets = drawn(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp, _ = score_by_head(head, hidden, targets, temperature=1.0, rows=5)
        wanted, _ = whole(head, hidden, targets, 1.0)
    assert logp.dtype == torch.float32
    assert torch.allclose(logp, wanted, atol=1e-5)


def test_a_head_with_a_bias_or_a_hook_is_not_plain():
    assert is_plain(nn.Linear(2, 3, bias=False))
    assert not is_plain(nn.Linear(2, 3))
    hooked = nn.Linear(2, 3, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    assert not is_plain(hooked)
