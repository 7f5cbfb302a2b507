import math

import pytest

from deepswe.algorithms.advantages import ADVANTAGES, group_mean, group_mean_std, leave_one_out


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


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_equal_rewards_give_exact_zeros_and_others_sum_to_zero(name):
    assert ADVANTAGES[name]([0.1, 0.1, 0.1]) == (0.0, 0.0, 0.0)
    assert math.fsum(ADVANTAGES[name]([0.1, 0.9, 0.4, 0.4])) == pytest.approx(0)


def test_no_rewards_is_an_error():
    for function in ADVANTAGES.values():
        with pytest.raises(ValueError, match="rewards"):
            function([])
