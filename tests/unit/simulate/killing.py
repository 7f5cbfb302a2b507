"""A simulated run that is killed at any turn of its event loop, and taken up from what it left on the disk."""

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from deepswe.config import Recipe, build_recipe
from deepswe.rollout.ledger import Ledger
from deepswe.rollout.store import TrajectoryStore
from deepswe.simulate import run as run_module
from deepswe.simulate.clock import VirtualLoop
from deepswe.simulate.profile import Profile, Spread
from deepswe.simulate.run import simulate
from deepswe.training.metrics import read_rows

PROFILE = Profile(
    gpus=4,
    learner_gpus=1,
    prompt_tokens=64,
    turns=Spread(median=3, sigma=0.5, most=6),
    turn_tokens=Spread(median=200, sigma=0.9, most=2000),
    observation_tokens=Spread(median=50, sigma=0.5),
    slowness=Spread(median=2.0, sigma=1.0),
)
CHECKPOINT_EVERY = 3


class Killed(BaseException):
    pass


def recipe(steps: int = 5, groups: int = 3, attempts: int = 2, **asynchrony: Any) -> Recipe:
    return build_recipe(
        {
            "run": {"name": "killed"},
            "tasks": {"kind": "micro"},
            "rollout": {"tasks_per_step": groups, "group_size": attempts, "max_steps": 6},
            "training": {"steps": steps},
            "asynchrony": asynchrony,
        },
        origin="test",
    )


def run_once(wanted: Recipe, directory: Path, *, start: int, kill_after: int, patch: pytest.MonkeyPatch) -> int:
    """Run until the end (returns -1) or the kill, which leaves the directory as it was at that moment.

    Returns:
        the step of the checkpoint that the next process begins with.
    """
    reached = start
    frozen = directory.with_name("frozen")

    def on_step(step: int) -> None:
        nonlocal reached
        reached = step

    class Killing(VirtualLoop):
        turns = 0

        def _run_once(self) -> None:
            self.turns += 1
            if self.turns == kill_after:
                shutil.copytree(directory, frozen)
                raise Killed
            super()._run_once()  # type: ignore[misc]

    def run(work: Any) -> Any:
        with asyncio.Runner(loop_factory=Killing) as runner:
            try:
                return runner.run(work)
            finally:  # what is left is the loop's own end, and no longer the run's
                cast(Killing, runner.get_loop()).turns = kill_after

    patch.setattr(run_module, "run_virtual", run)
    try:
        simulate(wanted, PROFILE, directory, start=start, on_step=on_step)
    except Killed:
        # What ran on after the kill, to close, did not happen.
        shutil.rmtree(directory)
        frozen.rename(directory)
        return reached // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    return -1


def check_accounts(wanted: Recipe, directory: Path) -> None:
    """Every attempt is recorded once, every group settled once, and each step trained what its row says."""
    rollout, steps = wanted.rollout, wanted.training.steps
    recorded = list(TrajectoryStore(directory).read("train"))
    counts = Counter(t.key for t in recorded)
    assert set(counts.values()) == {1}, "an attempt is recorded twice"
    ledger = Ledger(directory / "trajectories" / "ledger.jsonl")
    assert sorted(ledger.opened) == list(range(len(ledger.opened)))
    assert len(recorded) == len(ledger.opened) * rollout.group_size, "an attempt is lost"
    trained = [number for numbers in ledger.trained.values() for number in numbers]
    assert sorted(ledger.trained) == list(range(steps))
    assert all(len(numbers) == rollout.tasks_per_step for numbers in ledger.trained.values())
    assert sorted([*trained, *ledger.dropped]) == sorted(ledger.opened), "a group is not settled once"
    for step, numbers in ledger.trained.items():
        assert all(0 <= step - ledger.opened[number] <= wanted.asynchrony.max_age for number in numbers)
    if not wanted.asynchrony.overprovision:
        assert not ledger.dropped, "groups are only dropped where more are made than train"
    groups = {(t.step, t.task_id) for t in recorded}
    lengths = Counter[tuple[int, str]]()
    for t in recorded:
        if t.sampled_length:
            lengths[t.step, t.task_id] += t.length
    assert len(groups) == len(ledger.opened)
    rows = {row["step"]: row for row in read_rows(directory / "metrics.jsonl") if row["kind"] == "train"}
    assert sorted(rows) == list(range(1, steps + 1))
    by_number = {number // rollout.tasks_per_step: number for number in ledger.opened}
    assert by_number
    total = sum(row["tokens"] for row in rows.values())
    if not ledger.dropped:
        assert total == sum(lengths.values()), "a row counts other tokens than its groups have"
    assert not list((directory / "trajectories").glob("*.partial.*"))
