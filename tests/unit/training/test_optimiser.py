import math

import pytest
import torch
from torch import nn

from deepswe.training.optimiser import Optimiser, scheduled_rate


def rates(decay, count=8):
    return [scheduled_rate(n, peak=1.0, warmup=3, total=7, decay=decay) for n in range(count)]


def test_warm_up_is_linear_and_constant_stays():
    assert rates("constant") == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_linear_decay_reaches_zero_after_the_last_update():
    assert rates("linear") == [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0]


def test_cosine_decay_is_half_way_down_in_the_middle():
    assert rates("cosine")[3:] == pytest.approx(
        [1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2, 0]
    )


def optimiser(model, **options):
    defaults = {"peak": 0.1, "warmup": 0, "weight_decay": 0.0, "betas": (0.9, 0.95), "grad_clip": 1.0}
    return Optimiser(model, **{**defaults, **options})


def test_step_reports_the_norm_before_clipping_and_clears():
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    subject = optimiser(model)
    assert subject.step() == pytest.approx(5.0)
    assert model.weight.grad is None
    assert subject.updates == 1


def test_weight_decay_shrinks_matrices_only():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    model.weight.grad, model.bias.grad = torch.zeros(1, 2), torch.zeros(1)
    optimiser(model, weight_decay=0.5).step()
    assert model.weight.tolist() == [[pytest.approx(0.95)] * 2]
    assert model.bias.tolist() == [1.0]
