from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from scipy.stats import binomtest

from deepswe.errors import ConfigError
from deepswe.evaluation.compare import compare, exact_sign_test
from deepswe.evaluation.leaderboard import leaderboard
from deepswe.evaluation.results import Budget, Results, load_results, read_report

KNOWN = Budget(steps=100, tokens=65_536, turn_tokens=4096, dollars=0.0, wall_s=5400.0, generation_s=1200.0)


def write(path: Path, record: object) -> Path:
    path.write_text(json.dumps(record))
    return path


def test_the_exact_test_is_scipys_binomial_test() -> None:
    for won in range(0, 30, 3):
        for lost in range(0, 40, 7):
            expected = binomtest(won, won + lost).pvalue if won + lost else 1.0
            assert exact_sign_test(won, lost) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="never negative"):
        exact_sign_test(-1, 2)


def test_won_and_lost_are_counted_by_task_and_the_difference_is_paired() -> None:
    first = Results("a", {"t1": (1.0, 0.0), "t2": (1.0,), "t3": (0.0,), "t4": (1.0,), "only": (1.0,)}, KNOWN)
    second = Results("b", {"t1": (1.0, 1.0), "t2": (0.0,), "t3": (0.0,), "t4": (1.0,), "none": ()}, KNOWN)
    found = compare(first, second)
    assert (found.won, found.lost, found.both, found.either) == (("t1",), ("t2",), 2, 3)
    assert found.means == (0.625, 0.5)
    assert found.difference.mean == pytest.approx(-0.125)
    assert (found.difference.tasks, found.difference.unpaired, found.p_value) == (4, 2, 1.0)


def test_unequal_and_unknown_budgets_are_refused_unless_forced() -> None:
    outcomes = {"t": (1.0,), "u": (0.0,)}
    larger = Results("large", outcomes, Budget(200, 65_536, 4096, 0.0, 5400.0, 1200.0))
    with pytest.raises(ConfigError, match=r"steps 100 and 200.*--force"):
        compare(Results("small", outcomes, KNOWN), larger)
    with pytest.raises(ConfigError, match="unknown"):
        compare(Results("a", outcomes), Results("b", outcomes))
    assert compare(Results("small", outcomes, KNOWN), larger, force=True).unequal == {"steps": (100, 200)}


def test_tasks_that_a_published_list_does_not_name_count_as_unsolved_in_both(tmp_path: Path) -> None:
    first = read_report(write(tmp_path / "a.json", {"resolved": ["x", "y"], "total": 10}), name="a")
    second = read_report(write(tmp_path / "b.json", {"resolved": ["y", "z"], "total": 10}), name="b")
    found = compare(first, second, force=True)
    assert (found.won, found.lost, found.both, found.either) == (("z",), ("x",), 1, 3)
    assert (found.difference.tasks, found.means) == (10, (0.2, 0.2))
    ours = Results("ours", {f"t{number}": (0.0,) for number in range(9)} | {"x": (1.0,)}, KNOWN)
    with pytest.raises(ConfigError, match="not of one task set"):
        compare(first, ours, force=True)
    ours = Results("ours", {f"t{number}": (0.0,) for number in range(8)} | {"x": (1.0,), "y": (0.0,)}, KNOWN)
    assert compare(first, ours, force=True).means == (0.2, 0.1)
    with pytest.raises(ConfigError, match="resolved tasks of 1"):
        read_report(write(tmp_path / "c.json", {"resolved": ["x", "y"], "total": 1}))


def test_published_results_give_their_own_counts() -> None:
    folder = os.environ.get("DEEPSWE_TEST_DATA")
    if not folder:
        pytest.skip("DEEPSWE_TEST_DATA is not set; it names the folder of published records")
    single, chosen = sorted(Path(folder, "results").glob("*deepswerl*.json"))
    found = compare(load_results(f"one={single}"), load_results(f"hybrid={chosen}"), force=True)
    assert (found.first, found.second) == ("one", "hybrid")
    assert (found.both, found.either) == (196, 309)
    assert found.means == (0.422, 0.588)
    assert (len(found.won), len(found.lost)) == (98, 15)


def test_reports_of_the_official_evaluation_are_read_and_failures_of_it_have_no_verdict(tmp_path: Path) -> None:
    report = {
        "total_instances": 6, "submitted_instances": 6, "schema_version": 2,
        "submitted_ids": ["e", "i", "n", "r", "u", "x"], "completed_ids": ["r", "u", "x"], "resolved_ids": ["r"],
        "unresolved_ids": ["u", "x"], "infra_failure_ids": ["x"], "empty_patch_ids": ["n"], "error_ids": ["e"],
        "incomplete_ids": ["i"],
    }  # fmt: skip
    assert read_report(write(tmp_path / "report.json", report)).outcomes == {
        "e": (), "i": (), "n": (0.0,), "r": (1.0,), "u": (0.0,), "x": (),
    }  # fmt: skip
    single = {"r": {"resolved": True, "patch_exists": True}, "u": {"resolved": False}}
    assert read_report(write(tmp_path / "single.json", single)).outcomes == {"r": (1.0,), "u": (0.0,)}
    with pytest.raises(ConfigError, match="no list of resolved tasks"):
        read_report(write(tmp_path / "other.json", {"a": 1}))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_report(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="no run directory"):
        load_results(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"resolved": ["a"], "total": 10**12}, "1000000000000 in all"),
        ({"resolved": ["a"], "total": True}, "of True in all"),
        ({"resolved": [["a"]], "total": 5}, r"resolved\[0\] is a list, not a str"),
        ({"resolved": ["a"], "total": 5, "generated": 3}, "generated is a int, not a list"),
        ({"resolved_ids": ["a"], "error_ids": "abc"}, "error_ids is a str, not a list"),
        ({"a": {"resolved": "no"}}, r"resolved\['a'\] is a str, not a bool"),
        ({"a": {"resolved": True}, "b": {}}, r"resolved\['b'\] is a NoneType"),
    ],
)
def test_results_with_a_value_of_the_wrong_kind_are_refused(tmp_path: Path, record: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_report(write(tmp_path / "results.json", record))


def test_the_leaderboard_is_sorted_and_names_are_unique(tmp_path: Path) -> None:
    low = Results("low", {"t": (0.0, 1.0), "u": (0.0, 0.0)}, KNOWN)
    high = Results("high", {"t": (1.0,)}, unlisted=1)
    best, second = leaderboard([low, high], {"low": 32.0})
    assert (best.name, best.mean, best.tasks, best.pass_at_k) == ("high", 0.5, 2, None)
    assert (second.mean, second.k, second.pass_at_k, second.size) == (0.25, 2, 0.5, 32.0)
    with pytest.raises(ConfigError, match="have the name"):
        leaderboard([low, low])
    with pytest.raises(ConfigError, match="--size names 'x'"):
        leaderboard([low], {"x": 1.0})
    with pytest.raises(ConfigError, match="no verdict"):
        leaderboard([Results("none", {"t": ()})])
    ranking = pytest.importorskip("deepswe.analysis.ranking")
    assert ranking.write_ranking([best, second], tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")
