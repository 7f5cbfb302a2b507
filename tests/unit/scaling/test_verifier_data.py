import pytest

from deepswe.algorithms.packing import make_samples
from deepswe.errors import ConfigError
from deepswe.scaling.candidates import Candidate
from deepswe.scaling.verifier_data import as_trajectory, balance, is_heldout, make_data_set


def candidates(tasks: int = 40, wrong: int = 6) -> list[Candidate]:
    """Each task has one right candidate, several wrong ones and one without an outcome; four tasks share a family."""
    made = []
    for task in range(tasks):
        for number in range(wrong + 2):
            outcome = {0: 1.0, wrong + 1: None}.get(number, 0.0)
            tags = {"repo": f"repo-{task % 9}", "family": str(task // 4)}
            made.append(Candidate(f"t{task}", f"train-{number}", f"patch {number}", outcome=outcome, tags=tags))
    return made


@pytest.mark.parametrize("split_by", ["repo", "family", "task"])
def test_no_group_is_on_both_sides(split_by: str) -> None:
    data = make_data_set(candidates(), split_by=split_by, heldout_share=0.3, seed=0)
    train, heldout = ({e.group for e in side} for side in (data.train, data.heldout))
    assert train
    assert heldout
    assert not train & heldout
    assert data.ungraded == 40


def test_training_has_as_many_right_as_wrong_and_the_prior_is_that_of_the_pool() -> None:
    data = make_data_set(candidates(), split_by="task", heldout_share=0.2, seed=0)
    assert sum(e.answer for e in data.train) * 2 == len(data.train)
    assert data.prior == pytest.approx(1 / 7)
    assert len(data.heldout) % 7 == 0


def test_wrong_ones_are_spread_over_the_tasks() -> None:
    data = make_data_set(candidates(), split_by="task", heldout_share=0.0, seed=0)
    wrong = [e.candidate.task_id for e in data.train if not e.answer]
    assert sorted(wrong) == sorted({f"t{task}" for task in range(40)})


def test_the_order_of_the_candidates_changes_nothing() -> None:
    made = candidates()
    first = make_data_set(made, split_by="repo", heldout_share=0.2, seed=1)
    assert make_data_set(made[::-1], split_by="repo", heldout_share=0.2, seed=1) == first
    assert make_data_set(made, split_by="repo", heldout_share=0.2, seed=2) != first


def test_more_data_moves_no_group_to_the_other_side() -> None:
    held = {group for group in map(str, range(1000)) if is_heldout(group, 0.1, 0)}
    assert 60 < len(held) < 140
    assert held <= {group for group in map(str, range(1000)) if is_heldout(group, 0.2, 0)}


def test_one_sort_of_answer_is_refused() -> None:
    right = [c for c in candidates() if c.outcome == 1.0]
    with pytest.raises(ConfigError, match="needs both right and wrong"):
        make_data_set(right, split_by="task", heldout_share=0.1, seed=0)


def test_a_bound_holds_on_both_sides_and_keeps_the_balance() -> None:
    data = make_data_set(candidates(), split_by="task", heldout_share=0.5, seed=0, most=12)
    assert (len(data.train), len(data.heldout)) == (12, 12)
    assert sum(e.answer for e in data.train) == 6
    assert data.prior == pytest.approx(1 / 7)


def test_balancing_what_is_balanced_keeps_all() -> None:
    data = make_data_set(candidates(wrong=1), split_by="task", heldout_share=0.0, seed=0)
    assert balance(data.train, 5) == data.train


def test_only_the_answer_is_in_the_loss() -> None:
    (sample,) = make_samples(as_trajectory("t", (5, 6, 7), 9))
    assert sample.tokens_L.tolist() == [5, 6, 7, 9]
    assert sample.mask_L.tolist() == [False, False, False, True]
