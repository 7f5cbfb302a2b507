from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from deepswe.policy.engine import sample


def by_hand(logits_NV: Tensor, temperature: float, uniforms_N: Tensor) -> tuple[list[int], list[float]]:
    logp_NV = (logits_NV.double() / temperature).log_softmax(-1)
    tokens = [
        int((row.exp().cumsum(0) <= u * row.exp().sum()).sum()) for row, u in zip(logp_NV, uniforms_N, strict=True)
    ]
    return tokens, [float(row[token]) for row, token in zip(logp_NV, tokens, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [3, 255, 1023, 1024, 1025, 1280, 5000])
def test_a_token_is_where_the_cumulative_distribution_passes_the_number(vocabulary: int, temperature: float) -> None:
    torch.manual_seed(vocabulary)
    logits_NV = 3 * torch.randn(200, vocabulary)
    uniforms_N = torch.rand(200, dtype=torch.float64)
    tokens, logprobs = by_hand(logits_NV, temperature, uniforms_N)
    tokens_N, logp_N = sample(logits_NV.clone(), np.full(200, temperature, np.float32), uniforms_N.numpy())
    # At a number within rounding of a border the neighbour is as right.
    assert sum(a != b for a, b in zip(tokens_N.tolist(), tokens, strict=True)) <= 1
    same_N = tokens_N == torch.tensor(tokens)
    torch.testing.assert_close(logp_N[same_N], torch.tensor(logprobs)[same_N], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-52])
@pytest.mark.parametrize("vocabulary", [600, 1100])
@pytest.mark.parametrize("only", [0, 255, 256, 511, 599])
def test_a_token_without_probability_is_never_drawn(only: int, vocabulary: int, uniform: float) -> None:
    logits_NV = torch.full((1, vocabulary), float("-inf"))
    logits_NV[0, only] = -3.0
    tokens_N, logp_N = sample(logits_NV, np.ones(1, np.float32), np.array([uniform]))
    assert tokens_N.tolist() == [only]
    assert logp_N.tolist() == [0.0]


@pytest.mark.parametrize("vocabulary", [700, 1700])
def test_temperatures_of_one_batch_are_each_rows_own(vocabulary: int) -> None:
    torch.manual_seed(0)
    logits_NV = torch.randn(3, vocabulary)
    uniforms_N = torch.rand(3, dtype=torch.float64)
    temperatures_N = np.array([0.0, 1.0, 2.0], np.float32)
    tokens_N, logp_N = sample(logits_NV.clone(), temperatures_N, uniforms_N.numpy())
    best = int(logits_NV[0].argmax())
    expected = [(best, float(logits_NV[0].log_softmax(-1)[best]))]
    for row, temperature in ((1, 1.0), (2, 2.0)):
        tokens, logprobs = by_hand(logits_NV[row : row + 1], temperature, uniforms_N[row : row + 1])
        expected.append((tokens[0], logprobs[0]))
    assert tokens_N.tolist() == [token for token, _ in expected]
    torch.testing.assert_close(logp_N, torch.tensor([logprob for _, logprob in expected]))


def test_logits_that_are_not_numbers_show_in_the_log_probs() -> None:
    for bad, vocabulary in product((float("nan"), float("inf")), (600, 1100)):
        logits_NV = torch.zeros(1, vocabulary)
        logits_NV[0, 300] = bad
        assert sample(logits_NV, np.ones(1, np.float32), np.array([0.5]))[1].isnan().all()
