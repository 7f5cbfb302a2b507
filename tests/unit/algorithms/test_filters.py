import pytest

from deepswe.algorithms.filters import select_group
from deepswe.config import AlgorithmConfig, EndingPolicy, EndingTable
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
