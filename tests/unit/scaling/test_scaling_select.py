import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepswe.errors import ConfigError
from deepswe.scaling.combine import fit_combination
from deepswe.scaling.select import SELECTORS, Scores, by_agreement, by_execution, hybrid, select, share_equal


def make(name: str, **scores: object) -> Scores:
    return Scores(name, str(scores.pop("patch", name)), **scores)  # type: ignore[arg-type]


def names(chosen: tuple[Scores, ...]) -> set[str]:
    return {candidate.candidate for candidate in chosen}


def test_hybrid_takes_the_best_by_execution_of_the_better_half_by_verifier() -> None:
    candidates = [
        make("likely", verifier=0.9, regression=0.5, reproduction={"t": True}),
        make("sound", verifier=0.8, regression=1.0, reproduction={"t": False}),
        make("better", verifier=0.2, regression=1.0, reproduction={"t": True}),
        make("worst", verifier=0.1, regression=1.0, reproduction={"t": True}),
    ]
    assert names(hybrid(candidates)) == {"sound"}
    assert names(by_execution(candidates)) == {"better", "worst"}


def test_half_of_an_odd_number_is_rounded_up_and_ties_at_its_edge_are_in() -> None:
    three = [make(n, verifier=v, regression=r) for n, v, r in (("a", 0.9, 0.1), ("b", 0.5, 0.9), ("c", 0.1, 1.0))]
    assert names(hybrid(three)) == {"b"}
    tied = [make(n, verifier=v, regression=r) for n, v, r in (("a", 0.9, 0.1), ("b", 0.5, 0.8), ("c", 0.5, 1.0))]
    assert names(hybrid(tied)) == {"c"}


@pytest.mark.parametrize("method", SELECTORS)
def test_one_candidate_is_chosen_whatever_its_scores(method: str) -> None:
    assert names(select(method, [make("only")])) == {"only"}


@pytest.mark.parametrize("method", ["verifier", "execution", "hybrid"])
def test_a_missing_score_is_below_every_score_and_all_missing_is_a_tie(method: str) -> None:
    candidates = [make("unknown"), make("known", verifier=0.01, regression=0.0, reproduction={})]
    assert names(select(method, candidates)) == {"known"}
    assert names(select(method, [make("a"), make("b")])) == {"a", "b"}
    nan = [make("nan", verifier=math.nan), make("known", verifier=0.0)]
    assert names(select("verifier", nan)) == {"known"}


def test_equal_patches_share_their_scores_and_keep_their_names() -> None:
    a, b, c = share_equal(
        [
            make("a", patch="p", verifier=0.2, reproduction={"t": True}),
            make("b", patch="p", verifier=0.6),
            make("c", patch="q", verifier=0.5),
        ]
    )
    assert (a.candidate, b.candidate, a.verifier, b.verifier) == ("a", "b", pytest.approx(0.4), pytest.approx(0.4))
    assert b.reproduction == {"t": True}
    assert c.verifier == 0.5


def test_agreement_prefers_the_behaviour_with_the_most_patches_times_tests() -> None:
    candidates = [
        make("lone", regression=1.0, reproduction={"a": True, "b": True, "c": True}),
        make("twin", regression=1.0, reproduction={"a": True, "b": True, "c": False}),
        make("brother", regression=1.0, reproduction={"a": True, "b": True, "c": False}),
        make("copy", patch="lone", regression=1.0, reproduction={"a": True, "b": True, "c": True}),
    ]
    assert names(by_agreement(candidates)) == {"twin", "brother"}


scored = st.builds(
    Scores,
    candidate=st.just(""),
    patch=st.sampled_from("pqr"),
    verifier=st.none() | st.sampled_from([0.1, 0.5, 0.9]),
    regression=st.none() | st.sampled_from([0.0, 0.5, 1.0]),
    reproduction=st.none() | st.fixed_dictionaries({"t": st.booleans(), "u": st.booleans()}),
)


@settings(deadline=None)
@given(st.lists(scored, min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_no_order_of_the_candidates_changes_a_choice(drawn: list[Scores], rng: random.Random) -> None:
    candidates = [Scores(str(i), c.patch, c.verifier, c.regression, c.reproduction) for i, c in enumerate(drawn)]
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    for method in SELECTORS:
        assert names(select(method, candidates)) == names(select(method, shuffled))


@pytest.mark.parametrize(
    ("method", "candidates", "words"),
    [
        ("best", [make("a")], "no selection method 'best'"),
        ("hybrid", [], "one at least"),
        ("hybrid", [make("a"), make("a")], "one name each"),
    ],
)
def test_bad_input_is_one_clear_error(method: str, candidates: list[Scores], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        select(method, candidates)


def test_a_combination_learns_which_score_tells_right_from_wrong() -> None:
    rng = random.Random(0)
    tasks = []
    for _ in range(60):
        outcomes = {str(i): float(rng.random() < 0.3) for i in range(8)}
        candidates = [
            make(name, verifier=rng.random(), regression=0.9 * right + 0.1 * rng.random(), reproduction={})
            for name, right in outcomes.items()
        ]
        tasks.append((candidates, outcomes))
    combination = fit_combination(tasks)
    candidates, outcomes = next(task for task in tasks if sum(task[1].values()) == 1)
    assert {outcomes[name] for name in names(combination(candidates))} == {1.0}
    assert abs(combination.weights[1]) < abs(combination.weights[2])


def test_fitting_on_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="known outcomes"):
        fit_combination([([make("a")], {})])


def test_a_patch_that_only_claims_success_gains_nothing() -> None:
    honest = make("honest", verifier=0.5, regression=1.0, reproduction={"t": True, "u": True})
    liar = make("liar", verifier=0.5, regression=0.0, reproduction={"t": False, "u": False})
    for method, order in itertools.product(("execution", "hybrid"), itertools.permutations([honest, liar])):
        assert names(select(method, order)) == {"honest"}
