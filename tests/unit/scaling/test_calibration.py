import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepswe.scaling.calibration import (
    area_under_roc,
    brier_score,
    calibrate,
    expected_calibration_error,
    with_prior,
)

PAIRS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1
)


@given(PAIRS)
def test_auroc_is_the_share_of_pairs_in_the_right_order(pairs: list[tuple[float, float]]) -> None:
    right = [p for p, outcome in pairs if outcome]
    wrong = [p for p, outcome in pairs if not outcome]
    found = area_under_roc([p for p, _ in pairs], [outcome for _, outcome in pairs])
    if not right or not wrong:
        assert found is None
    else:
        wins = sum((r > w) + 0.5 * (r == w) for r in right for w in wrong)
        assert found == pytest.approx(wins / (len(right) * len(wrong)), abs=1e-12)


@given(PAIRS)
def test_ece_is_the_weighted_gap_of_each_bin(pairs: list[tuple[float, float]]) -> None:
    whole = 0.0
    for low in range(10):
        held = [(p, o) for p, o in pairs if low <= p * 10 < low + 1 or (p == 1.0 and low == 9)]
        if held:
            confidence, share = (math.fsum(column) / len(held) for column in zip(*held, strict=True))
            whole += len(held) / len(pairs) * abs(share - confidence)
    probabilities, outcomes = zip(*pairs, strict=True)
    assert expected_calibration_error(probabilities, outcomes) == pytest.approx(whole, abs=1e-12)


def test_brier_is_the_mean_squared_error() -> None:
    assert brier_score([0.5, 1.0, 0.0], [1.0, 1.0, 1.0]) == pytest.approx((0.25 + 0.0 + 1.0) / 3)


def test_order_changes_no_figure() -> None:
    rng = random.Random(0)
    pairs = [(rng.random(), float(rng.random() < 0.4)) for _ in range(50)]
    first = calibrate(pairs)
    rng.shuffle(pairs)
    second = calibrate(pairs)
    assert first is not None
    assert second is not None
    assert first.auroc == second.auroc
    assert first.ece == pytest.approx(second.ece, abs=1e-12)


def test_a_missing_answer_is_counted_and_in_no_figure() -> None:
    found = calibrate([(0.9, 1.0), (None, 0.0), (math.nan, 1.0), (0.1, 0.0)])
    assert found is not None
    assert (found.candidates, found.missing, found.right, found.auroc) == (2, 2, 0.5, 1.0)
    assert not math.isnan(found.ece + found.brier)
    assert calibrate([(None, 1.0)]) is None


def test_one_sort_of_outcome_has_no_auroc() -> None:
    found = calibrate([(0.9, 1.0), (0.8, 1.0)])
    assert found is not None
    assert found.auroc is None


@given(st.floats(0.0, 1.0), st.floats(0.01, 0.99))
def test_a_prior_multiplies_the_odds_and_keeps_the_order(probability: float, prior: float) -> None:
    moved = with_prior(probability, prior)
    assert 0.0 <= moved <= 1.0
    if 1e-6 < probability < 1 - 1e-6:
        odds = probability / (1 - probability) * prior / (1 - prior)
        assert moved == pytest.approx(odds / (1 + odds), rel=1e-6)
    assert with_prior(0.3, prior) < with_prior(0.6, prior)
    assert with_prior(probability, 0.5) == pytest.approx(probability)
