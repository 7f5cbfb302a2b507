"""Killed at any moment and resumed, an asynchronous run loses nothing and counts nothing twice."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulate.killing import check_accounts, recipe, run_once


@pytest.mark.parametrize(
    "asynchrony",
    [
        {"max_age": 1},
        {"max_age": 4},
        {"max_age": 2, "overprovision": 0.5},
        {"overprovision": 0.34},
        {"quorum": 0.5},
        {"max_age": 2, "quorum": 0.5, "straggler_s": 30.0},
    ],
    ids=str,
)
def test_an_undisturbed_run_settles_every_group_once(
    asynchrony: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recipe(**asynchrony)
    (tmp_path / "run").mkdir()
    assert run_once(wanted, tmp_path / "run", start=0, kill_after=0, patch=monkeypatch) == -1
    check_accounts(wanted, tmp_path / "run")


@settings(max_examples=12, deadline=None)
@given(
    kills=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    max_age=st.integers(0, 3),
    overprovision=st.sampled_from([0.0, 0.5]),
    quorum=st.sampled_from([0.5, 1.0]),
)
def test_killed_at_any_moment_nothing_is_lost_or_counted_twice(
    kills: list[int], max_age: int, overprovision: float, quorum: float
) -> None:
    wanted = recipe(max_age=max_age, overprovision=overprovision, quorum=quorum)
    if not wanted.asynchrony.on:
        return
    with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        directory, start = Path(scratch, "run"), 0
        for kill_after in kills:
            directory.mkdir(exist_ok=True)
            start = run_once(wanted, directory, start=start, kill_after=kill_after, patch=patch)
            if start < 0:
                break
        if start >= 0:
            assert run_once(wanted, directory, start=start, kill_after=0, patch=patch) == -1
        check_accounts(wanted, directory)
