import math

import pytest
import torch

from deepswe.algorithms.losses import (
    DENOMINATORS,
    clipped_policy_loss,
    importance_weights,
    kl_estimate,
    kl_penalty,
    reinforce_loss,
    sum_by_row,
    value_loss,
)


def run(ratio: float, advantage: float, denominator: float = 1.0):
    """Loss and d loss / d logp of one token with that ratio, clip 0.2 / 0.28."""
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old = logp.detach() - math.log(ratio)
    result = clipped_policy_loss(
        logp,
        old,
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([denominator], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
    )
    result.loss.backward()
    return result, float(logp.grad)


def test_on_policy_gradient_is_minus_advantage_over_denominator():
    result, gradient = run(1.0, 0.75, denominator=4.0)
    assert float(result.loss.detach()) == pytest.approx(-0.75 / 4)
    assert gradient == pytest.approx(-0.75 / 4)


def test_ratio_multiplies_the_gradient_inside_the_bounds():
    result, gradient = run(1.1, 2.0)
    assert float(result.loss.detach()) == pytest.approx(-2.2)
    assert gradient == pytest.approx(-2.2)
    assert int(result.clipped_high) == int(result.clipped_low) == 0


def test_clip_high_stops_gradient_on_upweighted_token():
    result, gradient = run(1.3, 1.0)
    assert float(result.loss.detach()) == pytest.approx(-1.28)
    assert gradient == 0
    assert (int(result.clipped_low), int(result.clipped_high)) == (0, 1)


def test_the_upper_bound_is_the_high_one():
    _, gradient = run(1.25, 1.0)  # beyond 1 + clip_low, inside 1 + clip_high
    assert gradient == pytest.approx(-1.25)


def test_clip_low_stops_gradient_on_downweighted_token():
    result, gradient = run(0.7, -1.0)
    assert float(result.loss.detach()) == pytest.approx(0.8)
    assert gradient == 0
    assert (int(result.clipped_low), int(result.clipped_high)) == (1, 0)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, -1.0), (0.5, 1.0)])
def test_the_pessimistic_side_is_never_clipped(ratio, advantage):
    result, gradient = run(ratio, advantage)
    assert gradient == pytest.approx(-ratio * advantage)
    assert int(result.clipped_low) == int(result.clipped_high) == 0


def test_no_tokens_give_zero_loss():
    empty = torch.zeros(0, requires_grad=True)
    result = clipped_policy_loss(empty, empty, empty, empty, clip_low=0.2, clip_high=0.28)
    assert float(result.loss.detach()) == 0.0


def test_kl_estimate_by_hand_and_never_negative():
    logp = torch.tensor([0.0, math.log(2), -math.log(2)])
    expected = [0.0, 2 - 1 - math.log(2), 0.5 - 1 + math.log(2)]
    assert kl_estimate(logp, torch.zeros(3)).tolist() == pytest.approx(expected, abs=1e-6)


def test_kl_estimate_is_the_divergence_in_expectation():
    sampler, policy = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = (sampler * (sampler / policy).log()).sum()
    assert float((sampler * kl_estimate(policy.log(), sampler.log())).sum()) == pytest.approx(float(exact), abs=1e-6)


def test_denominators_by_hand():
    trained = [3, 1]
    arguments = {"trajectories": 8, "length": 10}
    assert DENOMINATORS["constant"](trained, **arguments) == [80, 80]
    assert DENOMINATORS["token_mean"](trained, **arguments) == [4, 4]
    assert DENOMINATORS["sequence_mean"](trained, **arguments) == [6, 2]


def test_constant_denominator_does_not_depend_on_length_or_filtering():
    one = DENOMINATORS["constant"]([5], trajectories=8, length=10)
    many = DENOMINATORS["constant"]([5, 900, 1], trajectories=8, length=10)
    assert {*one, *many} == {80.0}


def two_sequences():
    """Log-ratios (0.2, 0.0 | 0.4, -0.1, 0.0), advantages 1 and -1, with gradients."""
    log_ratio = torch.tensor([0.2, 0.0, 0.4, -0.1, 0.0], dtype=torch.float64)
    logp = (torch.full((5,), -1.0, dtype=torch.float64) + log_ratio).requires_grad_()
    old = torch.full((5,), -1.0, dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    row = torch.tensor([0, 0, 1, 1, 1])
    return logp, old, advantage, row


def test_the_ratio_of_a_sequence_is_the_geometric_mean_and_each_token_gets_its_share():
    logp, old, advantage, row = two_sequences()
    denominator = torch.tensor([4.0, 4.0, 6.0, 6.0, 6.0], dtype=torch.float64)  # sequence_mean
    result = clipped_policy_loss(
        logp, old, advantage, denominator, clip_low=0.2, clip_high=0.28, row_N=row, level="sequence_mean"
    )
    first, second = math.exp(0.1), math.exp(0.1)
    assert float(result.loss.detach()) == pytest.approx((-first + second) / 2)
    result.loss.backward()
    assert logp.grad[:2].tolist() == pytest.approx([-first / 2 / 2] * 2)
    assert logp.grad[2:].tolist() == pytest.approx([second / 2 / 3] * 3)
    assert float(result.ratio_max) == pytest.approx(first)


def test_the_product_ratio_clips_a_whole_sequence():
    logp, old, advantage, row = two_sequences()
    denominator = torch.tensor([4.0, 4.0, 6.0, 6.0, 6.0], dtype=torch.float64)
    result = clipped_policy_loss(
        logp, old, advantage, denominator, clip_low=0.2, clip_high=0.1, row_N=row, level="sequence"
    )
    result.loss.backward()
    assert logp.grad[:2].tolist() == [0, 0]  # exp(0.2) > 1.1
    assert logp.grad[2:].tolist() == pytest.approx([math.exp(0.3) / 2] * 3)
    assert int(result.clipped_high) == 2


def test_a_sequence_ratio_needs_the_rows():
    logp, old, advantage, _ = two_sequences()
    with pytest.raises(ValueError, match="needs row_N"):
        clipped_policy_loss(logp, old, advantage, old, clip_low=0.2, clip_high=0.2, level="sequence")


def test_importance_weights_by_hand():
    old = torch.tensor([math.log(3.0), 0.0, math.log(0.5), math.log(0.1)])
    zero, row = torch.zeros(4), torch.tensor([0, 0, 1, 1])

    def weights(kind, **bounds):
        return importance_weights(old, zero, row, kind=kind, **bounds).tolist()

    assert importance_weights(old, zero, row, kind="none", cap=2.0) is None
    assert weights("token_truncated", cap=2.0) == pytest.approx([2, 1, 0.5, 0.1])
    assert weights("token_truncated", cap=2.0, floor=0.25) == pytest.approx([2, 1, 0.5, 0.25])
    assert weights("token_masked", cap=2.0, floor=0.25) == pytest.approx([0, 1, 0.5, 0])
    assert weights("sequence_truncated", cap=2.0) == pytest.approx([2, 2, 0.05, 0.05])
    assert weights("sequence_masked", cap=2.0) == pytest.approx([0, 0, 0.05, 0.05])
    with pytest.raises(ValueError, match="no importance weights of kind 'word_truncated'"):
        weights("word_truncated", cap=2.0)


def test_an_importance_weight_scales_the_gradient_and_a_masked_token_has_none():
    logp, old, advantage, row = two_sequences()
    weight = torch.tensor([0.5, 0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    ones = torch.ones(5, dtype=torch.float64)
    result = clipped_policy_loss(logp, old, advantage, ones, clip_low=0.5, clip_high=9.0, row_N=row, weight_N=weight)
    result.loss.backward()
    expected = [-0.5 * math.exp(0.2), 0, math.exp(0.4), math.exp(-0.1), 2]
    assert logp.grad.tolist() == pytest.approx(expected)


def test_reinforce_is_minus_advantage_times_log_probability():
    logp, _, advantage, _ = two_sequences()
    result = reinforce_loss(logp, advantage, torch.full((5,), 2.0), weight_N=torch.tensor([1.0, 1, 1, 1, 3]))
    result.loss.backward()
    assert logp.grad.tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5, 1.5])
    assert (int(result.clipped_low), int(result.clipped_high), float(result.ratio_sum)) == (0, 0, 5)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 1 - 0.5),
    ],
)
def test_the_three_estimators_of_the_divergence_by_hand(kind, value, gradient):
    logp = torch.tensor([math.log(0.4)], dtype=torch.float64, requires_grad=True)
    estimate = kl_penalty(logp, torch.tensor([math.log(0.2)], dtype=torch.float64), kind=kind)
    estimate.sum().backward()
    assert float(estimate.detach()) == pytest.approx(value)
    assert float(logp.grad) == pytest.approx(gradient)


def test_the_estimators_are_the_divergence_in_expectation_and_only_k2_has_its_gradient():
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    exact = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    gradients = {}
    for kind in ("k1", "k2", "k3"):
        logp = logits.log_softmax(0)
        expected = (logp.exp().detach() * kl_penalty(logp, reference, kind=kind)).sum()
        if kind != "k2":
            assert float(expected.detach()) == pytest.approx(float(exact.detach()))
        (gradients[kind],) = torch.autograd.grad(expected, logits)
    assert gradients["k2"].tolist() == pytest.approx(wanted.tolist())
    assert gradients["k1"].tolist() == pytest.approx([0, 0, 0], abs=1e-12)


def test_value_loss_counts_actions_alone():
    value = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    loss = value_loss(value, torch.ones(3, dtype=torch.float64), weights)
    loss.backward()
    assert float(loss.detach()) == pytest.approx((0.25 + 0.01) / 4)
    assert value.grad.tolist() == pytest.approx([-0.25, 0, -0.05])


def test_sums_by_row_and_no_tokens():
    values, row = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1])
    assert sum_by_row(values, row).tolist() == [5, 2, 5]
    assert sum_by_row(values, row, mean=True).tolist() == [2.5, 2, 2.5]
    assert sum_by_row(values[:0], row[:0]).tolist() == []
