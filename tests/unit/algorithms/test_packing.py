from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepswe.algorithms.packing import collate, make_samples, padding_share, split_by_tokens
from deepswe.types import Ending, Graded, TokenSpan, Trajectory


def trajectory(*spans: TokenSpan) -> Trajectory:
    return Trajectory("task", 0, "train", 0, spans, (), Ending.SUBMITTED, Graded(1.0))


def make_sample(attempt: Trajectory, advantage: float, **options):
    (sample,) = make_samples(attempt, [advantage] * 2, **options)
    return sample


PROMPT = TokenSpan((10, 11, 12), False)
ACTION = TokenSpan((20, 21), True, (-0.5, -0.25))
ANSWER = TokenSpan((30,), False)
LAST = TokenSpan((40,), True, (-2.0,))


def test_a_sample_is_the_stream_with_only_sampled_tokens_in_the_loss():
    sample = make_sample(trajectory(PROMPT, ACTION, ANSWER, LAST), 0.5)
    assert sample.tokens_L.tolist() == [10, 11, 12, 20, 21, 30, 40]
    assert sample.mask_L.tolist() == [False, False, False, True, True, False, True]
    assert sample.sampler_logp_L.tolist() == [0, 0, 0, -0.5, -0.25, 0, -2.0]
    assert sample.advantage_L.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0.5]
    assert sample.turn_L.tolist() == [-1, -1, -1, 0, 0, -1, 1]
    assert (sample.length, sample.trained) == (7, 3)


def test_tokens_after_the_last_trained_one_are_not_computed():
    assert make_sample(trajectory(PROMPT, ACTION, ANSWER), 0.5).length == 5


def test_language_modelling_trains_every_token_but_the_first():
    sample = make_sample(trajectory(PROMPT, ACTION, ANSWER), 1.0, all_tokens=True)
    assert sample.mask_L.tolist() == [False] + [True] * 5


def test_a_sampled_first_token_has_nothing_to_predict_it():
    assert make_sample(trajectory(ACTION), 1.0).mask_L.tolist() == [False, True]


def test_collate_pads_on_the_right_and_lists_trained_tokens_row_by_row():
    short, long = make_sample(trajectory(PROMPT, LAST), -1.0), make_sample(trajectory(PROMPT, ACTION, ANSWER, LAST), 2)
    batch = collate([long, short])
    assert batch.tokens_BT.tolist() == [[10, 11, 12, 20, 21, 30, 40], [10, 11, 12, 40, 0, 0, 0]]
    assert batch.tokens_BT[batch.mask_BT].tolist() == [20, 21, 40, 40]
    assert batch.sampler_logp_N.tolist() == [-0.5, -0.25, -2.0, -2.0]
    assert batch.advantage_N.tolist() == [2, 2, 2, -1]
    assert batch.row_N.tolist() == [0, 0, 0, 1]
    assert batch.tokens_BT.dtype == torch.int64


def test_split_sorts_by_length_under_the_budget():
    assert split_by_tokens([3, 10, 4, 9], 20) == [[1, 3], [2, 0]]


def test_a_sample_over_the_budget_is_alone():
    assert split_by_tokens([50, 2, 2], 10) == [[0], [1, 2]]


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 300))
def test_split_is_a_partition_within_budget(lengths, budget):
    batches = split_by_tokens(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget


def test_padding_share_by_hand():
    assert padding_share([3, 1], [[0, 1]]) == pytest.approx(1 - 4 / 6)
    assert padding_share([], []) == 0.0


def test_a_trajectory_whose_history_was_shortened_gives_one_sample_for_each_sequence():
    shortened = replace(trajectory(PROMPT, ACTION, TokenSpan((10, 11, 21, 30), False), LAST), starts=(2,))
    first, second = make_samples(shortened, [0.5, -1.0])
    assert first.tokens_L.tolist() == [10, 11, 12, 20, 21]
    assert second.tokens_L.tolist() == [10, 11, 21, 30, 40]
    assert second.mask_L.tolist() == [False] * 4 + [True]
    assert (first.advantage_L[-1], second.advantage_L[-1]) == (0.5, -1.0)
    assert (first.turn_L[-1], second.turn_L[-1]) == (0, 1)


def test_packed_samples_stand_end_to_end_and_positions_start_anew():
    short, long = make_sample(trajectory(PROMPT, LAST), -1.0), make_sample(trajectory(PROMPT, ACTION, ANSWER, LAST), 2)
    batch = collate([long, short], packed=True)
    assert batch.tokens_BT.tolist() == [[10, 11, 12, 20, 21, 30, 40, 10, 11, 12, 40]]
    assert batch.position_BT.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]]
    assert batch.tokens_BT[batch.mask_BT].tolist() == [20, 21, 40, 40]
    assert batch.row_N.tolist() == [0, 0, 0, 1]
    assert batch.turn_N.tolist() == [0, 0, 1, 0]
    assert batch.advantage_N.tolist() == [2, 2, 2, -1]
    assert batch.from_N.tolist() == [2, 3, 5, 9]
    assert batch.target_N.tolist() == [20, 21, 40, 40]
    assert [branch.own for branch in batch.branches] == [(0, 7), (7, 11)]
    assert not any(branch.before for branch in batch.branches)


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 300))
def test_packed_split_is_a_partition_within_budget(lengths, budget):
    batches = split_by_tokens(lengths, budget, packed=True)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in batches)


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_are_halved_until_each_process_has_as_many(packed):
    split = split_by_tokens([9, 8, 3, 2, 1], 12, packed=packed, multiple=2)
    assert len(split) % 2 == 0
    assert sorted(index for batch in split for index in batch) == list(range(5))
    assert split_by_tokens([9], 12, packed=packed, multiple=2) == [[0]]
