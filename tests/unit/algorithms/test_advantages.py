import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepswe.algorithms.advantages import (
    ADVANTAGES,
    discounted_returns,
    gae,
    gae_of_sequence,
    group_mean,
    group_mean_std,
    leave_one_out,
    no_baseline,
    whitened,
)

RELATIVE = {"leave_one_out", "group_mean", "group_mean_std", "global_mean", "global_mean_std"}


def test_leave_one_out_compares_each_with_the_mean_of_the_others():
    # one success in four: 1 - 0 = 1; each failure: 0 - 1/3
    assert leave_one_out([1, 0, 0, 0]) == pytest.approx((1, -1 / 3, -1 / 3, -1 / 3))
    assert leave_one_out([1, 0]) == (1, -1)
    assert leave_one_out([0.5, 1.0, 0.0]) == pytest.approx((0, 0.75, -0.75))


def test_leave_one_out_is_group_mean_times_g_over_g_minus_1():
    rewards = [1, 0, 0, 1, 0.25]
    scaled = [5 / 4 * value for value in group_mean(rewards)]
    assert leave_one_out(rewards) == pytest.approx(scaled)


def test_leave_one_out_needs_a_sibling():
    with pytest.raises(ValueError, match="got 1 rewards; it needs at least 2"):
        leave_one_out([1.0])


def test_group_mean_by_hand():
    assert group_mean([1, 0, 0, 0]) == pytest.approx((0.75, -0.25, -0.25, -0.25))
    assert group_mean([0.3]) == (0.0,)


def test_group_mean_std_divides_by_the_sample_deviation():
    # mean 1/4; deviation sqrt((9/16 + 3/16) / 3) = 1/2
    assert group_mean_std([1, 0, 0, 0]) == pytest.approx((1.5, -0.5, -0.5, -0.5), rel=1e-5)
    assert group_mean_std([1.0]) == (0.0,)


@pytest.mark.parametrize("name", sorted(RELATIVE))
def test_equal_rewards_give_exact_zeros_and_others_sum_to_zero(name):
    assert ADVANTAGES[name]([0.1, 0.1, 0.1]) == (0.0, 0.0, 0.0)
    assert math.fsum(ADVANTAGES[name]([0.1, 0.9, 0.4, 0.4])) == pytest.approx(0)


def test_no_rewards_is_an_error():
    for function in (ADVANTAGES[name] for name in sorted(RELATIVE)):
        with pytest.raises(ValueError, match="rewards"):
            function([])


def test_without_a_baseline_the_advantage_is_the_reward():
    assert no_baseline([1.0, 0.0, 0.5]) == (1.0, 0.0, 0.5)
    assert no_baseline([]) == ()


def test_returns_fall_by_the_discount_for_each_turn_that_comes_later():
    assert discounted_returns(1.0, 3, 0.5) == (0.25, 0.5, 1.0)
    assert discounted_returns(0.7, 2, 1.0) == (0.7, 0.7)
    assert discounted_returns(1.0, 0, 0.5) == ()


def test_gae_by_hand():
    # delta = (0.5*0.4 - 0.2, 1 - 0.4) = (0, 0.6); A = (0 + 0.5*0.5*0.6, 0.6)
    advantages, targets = gae([0.2, 0.4], 1.0, discount=0.5, lam=0.5)
    assert advantages == pytest.approx((0.15, 0.6))
    assert targets == pytest.approx((0.35, 1.0))


def test_gae_with_lambda_1_is_the_return_minus_the_value_and_with_0_the_one_step_error():
    values = [0.1, 0.5, 0.3]
    advantages, targets = gae(values, 1.0, discount=1.0, lam=1.0)
    assert advantages == pytest.approx((0.9, 0.5, 0.7))
    assert targets == pytest.approx((1.0, 1.0, 1.0))
    assert gae(values, 1.0, discount=1.0, lam=0.0)[0] == pytest.approx((0.4, -0.2, 0.7))
    assert gae([], 1.0, discount=1.0, lam=1.0) == ((), ())


def test_a_turn_as_the_action_shares_one_advantage_among_its_tokens():
    # values of the states before turn 0 and turn 1: 0.2 and 0.6
    advantages, targets, begins = gae_of_sequence(
        [0.2, 0.9, 0.6, 0.7, 0.8], [0, 0, 1, 1, 1], 1.0, by_turn=True, discount=1.0, lam=0.0
    )
    assert advantages == pytest.approx([0.4, 0.4, 0.4, 0.4, 0.4])
    assert targets == pytest.approx([0.6, 0.6, 1.0, 1.0, 1.0])
    assert begins == [True, False, True, False, False]
    by_token, _, each = gae_of_sequence([0.2, 0.9], [0, 0], 1.0, by_turn=False, discount=1.0, lam=0.0)
    assert by_token == pytest.approx([0.7, 0.1])
    assert each == [True, True]


def test_whitened_advantages_have_mean_0_and_deviation_1():
    values = whitened([1.0, 2.0, 3.0, 6.0])
    assert math.fsum(values) == pytest.approx(0)
    assert math.fsum(value * value for value in values) / 3 == pytest.approx(1, rel=1e-5)
    assert whitened([0.4, 0.4]) == (0.0, 0.0)
    assert whitened([]) == ()


rewards = st.lists(st.floats(0, 1, width=32), min_size=2, max_size=12)


@given(rewards, st.floats(-3, 3))
def test_a_shift_of_all_rewards_changes_no_advantage(values, shift):
    for name in RELATIVE - {"group_mean_std", "global_mean_std"}:
        moved = ADVANTAGES[name]([value + shift for value in values])
        assert moved == pytest.approx(ADVANTAGES[name](values), abs=1e-6)


@given(rewards)
def test_relative_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(values):
    for name in RELATIVE:
        advantages = ADVANTAGES[name](values)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-9)
        by_reward = [advantage for _, advantage in sorted(zip(values, advantages, strict=True))]
        assert by_reward == sorted(by_reward)


@given(rewards)
def test_leave_one_out_of_one_does_not_depend_on_its_own_reward_but_by_itself(values):
    first = leave_one_out(values)[0]
    raised = leave_one_out([values[0] + 1.0, *values[1:]])[0]
    assert raised - first == pytest.approx(1.0, abs=1e-9)
