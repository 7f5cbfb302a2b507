import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepswe.algorithms.filters import select_group, select_groups, turns
from deepswe.config import PRESETS, AlgorithmConfig, EndingPolicy, EndingTable
from deepswe.types import Ending, Graded, TokenSpan, Trajectory, Ungraded


def attempt(number: int, reward: float | None, ending: Ending = Ending.SUBMITTED, tokens: int = 2) -> Trajectory:
    grade = Ungraded("sandbox died", "sandbox.exec") if reward is None else Graded(reward)
    spans = (TokenSpan((1, 2), False), TokenSpan((3,) * tokens, True, (-0.5,) * tokens))
    return Trajectory("task", number, "train", 0, spans, (), ending, grade)


def scores(selection):
    return {scored.trajectory.attempt: scored.advantage for scored in selection.scored}


def test_masked_endings_neither_train_nor_move_the_baseline():
    kept = [attempt(0, 1.0), attempt(1, 0.0), attempt(2, 0.0)]
    masked = [attempt(3, 0.0, Ending.MAX_STEPS), attempt(4, 1.0, Ending.MAX_CONTEXT)]
    alone = select_group(kept, AlgorithmConfig())
    together = select_group([*kept, *masked], AlgorithmConfig())
    assert scores(together) == scores(alone) == {0: 1.0, 1: -0.5, 2: -0.5}
    assert together.counts["masked"] == 2


def test_ungraded_trajectories_never_train_nor_count_whatever_the_table_says():
    group = [attempt(0, 1.0), attempt(1, 0.0), attempt(2, None), attempt(3, None, Ending.ERROR)]
    selection = select_group(group, AlgorithmConfig())
    assert scores(selection) == {0: 1.0, 1: -1.0}
    assert selection.counts["ungraded"] == 2


def test_an_error_with_a_grade_is_still_not_trained():
    group = [attempt(0, 1.0), attempt(1, 0.0), attempt(2, 0.0, Ending.ERROR)]
    assert scores(select_group(group, AlgorithmConfig())) == {0: 1.0, 1: -1.0}


def test_uniform_groups_are_dropped_after_filtering():
    # the only success was cut off: what is left is uniform
    group = [attempt(0, 0.0), attempt(1, 0.0), attempt(2, 1.0, Ending.MAX_STEPS)]
    selection = select_group(group, AlgorithmConfig())
    assert selection.scored == ()
    assert selection.uniform
    assert selection.counts == {"total": 3, "ungraded": 0, "masked": 1, "uniform": 2}


def test_uniform_groups_stay_with_zero_advantage_when_asked():
    selection = select_group([attempt(0, 1.0), attempt(1, 1.0)], AlgorithmConfig(drop_uniform_groups=False))
    assert scores(selection) == {0: 0.0, 1: 0.0}


def test_an_ending_may_train_outside_the_baseline():
    endings = EndingTable(max_steps=EndingPolicy(train=True, baseline=False))
    group = [attempt(0, 1.0), attempt(1, 0.0), attempt(2, 0.0, Ending.MAX_STEPS)]
    selection = select_group(group, AlgorithmConfig(endings=endings))
    # siblings as if it were not there; itself against the mean of the two others
    assert scores(selection) == {0: 1.0, 1: -1.0, 2: -0.5}


def test_an_ending_may_stand_in_the_baseline_without_training():
    endings = EndingTable(max_steps=EndingPolicy(train=False, baseline=True))
    group = [attempt(0, 1.0), attempt(1, 0.0), attempt(2, 0.0, Ending.MAX_STEPS)]
    selection = select_group(group, AlgorithmConfig(endings=endings))
    assert scores(selection) == {0: 1.0, 1: -0.5}


@pytest.mark.parametrize("drop", [True, False])
def test_a_trajectory_without_a_sibling_does_not_train(drop):
    group = [attempt(0, 1.0), attempt(1, None), attempt(2, 0.0, Ending.ENV_TIMEOUT)]
    assert select_group(group, AlgorithmConfig(drop_uniform_groups=drop)).scored == ()


def test_a_trajectory_without_sampled_tokens_does_not_train():
    group = [attempt(0, 1.0), attempt(1, 0.0), attempt(2, 0.0, tokens=0)]
    assert set(scores(select_group(group, AlgorithmConfig()))) == {0, 1}


def test_counts_add_up_to_the_total():
    group = [attempt(0, 1.0), attempt(1, 0.0), attempt(2, None), attempt(3, 0.0, Ending.MAX_STEPS)]
    counts = dict(select_group(group, AlgorithmConfig()).counts)
    assert counts.pop("total") == sum(counts.values()) == 4


MASKED_AS_ZERO = {
    name: {"train": False, "baseline": True, "zero": True}
    for name in ("max_steps", "max_context", "generation_timeout", "env_timeout")
}


def test_the_original_s_behaviour_masked_but_counted_as_zero_lowers_the_siblings_baseline():
    kept = [attempt(0, 1.0), attempt(1, 0.0)]
    cut_off = [attempt(2, 1.0, Ending.MAX_STEPS), attempt(3, 0.0, Ending.ENV_TIMEOUT)]
    original = AlgorithmConfig(endings=MASKED_AS_ZERO)
    # with the two at 0: 1 - 0 and 0 - 1/3 instead of 1 and -1
    assert scores(select_group([*kept, *cut_off], original)) == pytest.approx({0: 1.0, 1: -1 / 3})
    assert scores(select_group([*kept, *cut_off], AlgorithmConfig())) == {0: 1.0, 1: -1.0}


def test_a_failure_is_no_reward_whatever_the_table_is_asked_to_do():
    for row in ({"train": True, "baseline": False}, {"train": False, "baseline": True, "zero": True}):
        with pytest.raises(ValueError, match="a failure is no reward"):
            EndingTable(error=EndingPolicy(**row))


def test_only_errors_are_tried_again_by_default():
    assert EndingTable().retried == {Ending.ERROR}
    table = AlgorithmConfig(endings={"env_timeout": {"retry": True}, "error": {"retry": False}}).endings
    assert table.retried == {Ending.ENV_TIMEOUT}
    assert not table.env_timeout.train


def aged(number: int, reward: float, *versions: int) -> Trajectory:
    spans = [TokenSpan((1, 2), False)]
    for version in versions:
        spans += [TokenSpan((3,), True, (-0.5,), version), TokenSpan((4,), False)]
    return Trajectory("task", number, "train", 0, tuple(spans), (), Ending.SUBMITTED, Graded(reward))


def test_trajectories_older_than_the_limit_neither_train_nor_move_the_baseline():
    group = [aged(0, 1.0, 7, 8), aged(1, 0.0, 8), aged(2, 0.0, 4, 8)]
    selection = select_group(group, AlgorithmConfig(max_age=3), version=8)
    assert scores(selection) == {0: 1.0, 1: -1.0}
    assert selection.counts["stale"] == 1
    assert set(scores(select_group(group, AlgorithmConfig(), version=8))) == {0, 1, 2}


def test_suspicious_trajectories_are_left_out_where_it_is_asked_for():
    group = [attempt(0, 1.0), attempt(1, 0.0), replace(attempt(2, 1.0), tags={"canary": "reads the grader"})]
    selection = select_group(group, AlgorithmConfig(mask_canaries=True))
    assert scores(selection) == {0: 1.0, 1: -1.0}
    assert selection.counts["canary"] == 1
    assert set(scores(select_group(group, AlgorithmConfig()))) == {0, 1, 2}


def test_a_global_baseline_is_that_of_the_whole_batch():
    groups = [[attempt(0, 1.0), attempt(1, 1.0)], [attempt(0, 0.0), attempt(1, 0.0)]]
    config = AlgorithmConfig(advantage="global_mean", drop_uniform_groups=False)
    selections = select_groups(groups, config)
    assert [scores(selection) for selection in selections] == [{0: 0.5, 1: 0.5}, {0: -0.5, 1: -0.5}]


def test_without_a_baseline_a_lone_trajectory_trains():
    config = AlgorithmConfig(preset="reinforce")
    assert scores(select_group([attempt(0, 1.0)], config)) == {0: 1.0}


def test_each_turn_is_compared_with_the_same_turn_of_its_siblings():
    group = [aged(0, 1.0, 0, 0), aged(1, 0.0, 0, 0), aged(2, 1.0, 0)]
    config = AlgorithmConfig(advantage_level="step", discount=0.5)
    selection = select_group(group, config)
    by_turn = {scored.trajectory.attempt: scored.advantages for scored in selection.scored}
    # returns by turn: (0.5, 1), (0, 0), (1)
    assert by_turn[0] == pytest.approx((0.5 - 0.5, 1.0))
    assert by_turn[1] == pytest.approx((-0.75, -1.0))
    assert by_turn[2] == pytest.approx((1 - 0.25,))


def test_a_turn_that_no_sibling_reached_has_no_advantage():
    group = [aged(0, 1.0, 0, 0), aged(1, 0.0, 0)]
    selection = select_group(group, AlgorithmConfig(advantage_level="step"))
    assert selection.scored[0].advantages == (1.0, 0.0)


def test_sampled_spans_that_follow_each_other_are_one_turn():
    spans = (
        TokenSpan((1,), False),
        TokenSpan((2,), True, (-1.0,), 0),
        TokenSpan((3,), True, (-1.0,), 1),
        TokenSpan((4,), False),
        TokenSpan((5,), True, (-1.0,), 1),
    )
    assert turns(spans) == (-1, 0, 0, -1, 1)


def test_informative_groups_are_those_with_a_gradient():
    assert select_group([attempt(0, 1.0), attempt(1, 0.0)], AlgorithmConfig()).informative
    assert not select_group([attempt(0, 1.0), attempt(1, 1.0)], AlgorithmConfig()).informative
    assert not select_group([attempt(0, 1.0)] * 2, AlgorithmConfig(drop_uniform_groups=False)).informative


endings = st.sampled_from(list(Ending))
outcomes = st.lists(st.tuples(st.sampled_from([None, 0.0, 0.5, 1.0]), endings), max_size=10)


@given(outcomes, outcomes)
def test_what_the_filters_take_out_moves_no_sibling_and_every_trajectory_is_counted_once(ours, others):
    config = AlgorithmConfig()
    kept = [attempt(n, reward, ending) for n, (reward, ending) in enumerate(ours)]
    masked = [
        attempt(100 + n, reward, ending)
        for n, (reward, ending) in enumerate(others)
        if ending is not Ending.SUBMITTED or reward is None
    ]
    alone, together = select_group(kept, config), select_group([*kept, *masked], config)
    assert scores(alone) == scores(together)
    assert math.fsum(scores(alone).values()) == pytest.approx(0)
    counts = dict(together.counts)
    assert counts.pop("total") == sum(counts.values()) == len(kept) + len(masked)


def test_a_preset_sets_the_other_keys_and_a_given_key_wins():
    grpo = AlgorithmConfig(preset="grpo", clip_high=0.3, endings={"max_steps": {"train": False}})
    assert (grpo.advantage, grpo.normalisation, grpo.kl_coefficient) == ("group_mean_std", "sequence_mean", 0.04)
    assert grpo.clip_high == 0.3
    assert grpo.endings.max_steps == EndingPolicy(train=False, baseline=True)
    assert grpo.endings.max_context == EndingPolicy(train=True, baseline=True)
    assert AlgorithmConfig.model_validate(grpo.model_dump()) == grpo
    assert AlgorithmConfig(preset="grpo_plus_plus") == AlgorithmConfig()


def test_every_preset_is_there_and_no_two_are_the_same():
    made = [AlgorithmConfig(preset=name).model_dump(exclude={"preset"}) for name in PRESETS]
    assert len(made) == 9
    assert all(one != other for index, one in enumerate(made) for other in made[:index])


def test_a_correction_that_the_ratio_holds_already_is_refused():
    with pytest.raises(ValueError, match="set old_logprobs to 'learner'"):
        AlgorithmConfig(importance="token_truncated")
