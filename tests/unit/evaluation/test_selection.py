import itertools
import json
import math
import os
from fractions import Fraction
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepswe.evaluation.metrics import paired_difference, pass_at_1
from deepswe.evaluation.selection import TaskCandidates, advise, best_at_k, scaling_curve
from deepswe.scaling.select import SELECTORS, Scores, by_verifier, hybrid, share_equal


def task(rows: list[tuple[float | None, float | None]], name: str = "t") -> TaskCandidates:
    """Candidates with (verifier, outcome)."""
    candidates = tuple(Scores(str(i), f"patch {i}", verifier) for i, (verifier, _) in enumerate(rows))
    return TaskCandidates(name, candidates, {str(i): out for i, (_, out) in enumerate(rows) if out is not None})


row = st.tuples(st.none() | st.sampled_from([0.2, 0.5, 0.8]), st.sampled_from([0.0, 1.0]))


@settings(deadline=None, max_examples=60)
@given(st.lists(row, min_size=1, max_size=7), st.data())
def test_best_at_k_is_the_mean_over_all_subsets(
    rows: list[tuple[float | None, float | None]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rows)))
    made = task(rows)
    for selector in SELECTORS.values():
        total = Fraction(0)
        for subset in itertools.combinations(made.candidates, k):
            chosen = selector(share_equal(subset))
            total += Fraction(int(sum(made.outcomes[c.candidate] for c in chosen)), len(chosen))
        exact = total / math.comb(len(rows), k)
        assert best_at_k(made, selector, k) == pytest.approx(float(exact), abs=1e-12)


def test_best_at_1_is_pass_at_1_and_a_perfect_verifier_reaches_pass_at_k() -> None:
    rows: list[tuple[float | None, float | None]] = [(out, out) for out in (1.0, 0.0, 0.0, 1.0, 0.0)]
    assert best_at_k(task(rows), by_verifier, 1) == pytest.approx(2 / 5)
    (point,) = scaling_curve([task(rows, "a"), task(rows, "b")], {"verifier": by_verifier}, [3])
    assert point.best["verifier"].mean == pytest.approx(point.pass_at_k.mean) == pytest.approx(1 - 1 / 10)


def test_candidates_without_a_verdict_are_left_out_and_tasks_with_too_few_too() -> None:
    ungraded = task([(0.9, None), (0.1, 1.0), (0.5, 0.0)])
    assert best_at_k(ungraded, by_verifier, 2) == 0.0
    with pytest.raises(ValueError, match="with 2 candidates"):
        best_at_k(ungraded, by_verifier, 3)
    assert [p.k for p in scaling_curve([ungraded], {"verifier": by_verifier}, [1, 2, 3])] == [1, 2]


def test_a_sample_of_subsets_is_near_the_mean_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = task([((i % 5) / 5, float(i % 3 == 0)) for i in range(16)])
    exact = fmean(
        fmean(made.outcomes[c.candidate] for c in hybrid(subset))
        for subset in itertools.combinations(made.candidates, 8)
    )
    assert best_at_k(made, hybrid, 8, seed=1) == pytest.approx(exact, abs=0.05)
    assert best_at_k(made, hybrid, 8, seed=1) == best_at_k(made, hybrid, 8, seed=1)


def test_advice_names_the_fewest_candidates_that_give_most_of_the_gain() -> None:
    rows: list[tuple[float | None, float | None]] = [(0.9, 1.0)] + [(0.1 + i / 100, 0.0) for i in range(15)]
    points = scaling_curve([task(rows, "a"), task(rows, "b")], {"verifier": by_verifier}, [1, 2, 4, 8, 12, 15, 16])
    assert advise(points, "verifier").startswith("K=15 gives 93% of the gain of K=16 by verifier")


def test_published_outcomes_of_deepswe_give_its_published_rates() -> None:
    folder = os.environ.get("DEEPSWE_TEST_DATA")
    if not folder:
        pytest.skip("DEEPSWE_TEST_DATA is not set; it names the folder of published records")
    single, scaled = (
        json.loads(Path(folder, "results", f"20250629_deepswerl_r2eagent{end}.results.json").read_text())
        for end in ("", "_tts")
    )
    assert single["total"] == scaled["total"] == 500
    known = {*single["resolved"], *scaled["resolved"]}
    others = [f"unsolved {number}" for number in range(500 - len(known))]
    before, after = (
        {name: [float(name in set(record["resolved"]))] for name in [*known, *others]} for record in (single, scaled)
    )
    assert pass_at_1(before).mean == pytest.approx(0.422)
    assert pass_at_1(after).mean == pytest.approx(0.588)
    assert sum(before[name] == after[name] == [1.0] for name in known) == 196
    assert len(known) == 309
    assert paired_difference(before, after).low > 0
