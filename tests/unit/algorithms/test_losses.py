import math

import pytest
import torch

from deepswe.algorithms.losses import DENOMINATORS, clipped_policy_loss, kl_estimate


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
