from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from deepswe.audit.attack import Target, put, target_of
from deepswe.audit.honest import HONEST, honest_task
from deepswe.audit.run import ATTACKS, Record, Result, audit_tasks, holds, run_audit, summary
from deepswe.config import MicroTasks
from deepswe.errors import ConfigError
from deepswe.progress import Silent
from deepswe.tasks.synth.micro.making import micro_task_set
from deepswe.tasks.task import HiddenTests, Measured, Repository, Task, TaskSet
from deepswe.tasks.taskset import save_task_set

TARGETS = (Target("shop.py", "tests/test_shop.py", False), Target("src/a/b.py", "tests/x/test_b.py", True))


def test_there_are_many_attacks_and_each_says_what_it_exploits() -> None:
    assert len(ATTACKS) >= 25
    assert len({attack.exploits for attack in ATTACKS.values()}) == len(ATTACKS)
    assert all(attack.exploits.endswith(".") for attack in ATTACKS.values())


@pytest.mark.parametrize("name", list(ATTACKS))
def test_the_code_of_an_attack_is_whole(name: str) -> None:
    attack = ATTACKS[name]
    for target in TARGETS:
        if attack.patch is not None:
            assert attack.patch(target).startswith("diff --git ")
            continue
        for script in attack.work(target):
            for data, path in re.findall(r'echo (\S+) \| base64 -d >>? "(.*?)"', script):
                text = base64.b64decode(data).decode()
                if path.endswith(".py") and not path.endswith("hard.py"):
                    compile(text, path, "exec")


def test_the_target_is_the_file_that_the_gold_patch_mends() -> None:
    gold = "diff --git a/src/shop.py b/src/shop.py\n--- a/src/shop.py\n+++ b/src/shop.py\n"
    hidden = HiddenTests("t", {}, ("tests/test_a.py::x",), (), "unittest", gold_patch=gold)
    target = target_of(Task("t", "r", "", Repository(), "s", "train"), hidden)
    assert target == Target("src/shop.py", "tests/test_a.py", False)
    assert target.module == "shop"


def test_honest_work_is_varied_and_needs_pytest_only_for_some() -> None:
    assert len(HONEST) >= 20
    assert len({case.name for case in HONEST}) == len(HONEST)
    for case in HONEST:
        task, hidden = honest_task(case, "env" if case.pytest else None)
        assert hidden.runner == ("pytest" if case.pytest else "unittest")
        assert "shop.py" in task.repository.files


def test_a_record_is_taken_up_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.add(Result("attack", "a", "t", 0.0, "why", ("seen",)))
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"kind": "att')
    again = Record(tmp_path)
    again.add(Result("attack", "b", "t", None, "broken"))
    last = Record(tmp_path)
    assert set(last.results) == {("attack", "a", "t"), ("attack", "b", "t")}
    assert last.results["attack", "a", "t"].observations == ("seen",)


def test_the_summary_counts_exploits_and_a_reward_of_the_naive_grader(tmp_path: Path) -> None:
    tasks = audit_tasks("micro", 2, 0, Silent())
    first, second = (task.id for task in tasks.tasks)
    record = Record(tmp_path)
    rows = [("attack", "conftest", first, 1.0), ("attack", "conftest", second, 0.0), ("naive", "conftest", first, 1.0)]
    rows += [
        ("check", name, first, 1.0 if name in ("gold", "noise") else 0.0) for name in ("gold", "noop", "empty", "noise")
    ]
    rows += [("honest", "plain", "honest-plain", 1.0), ("attack", "tox_ini", first, None)]
    for kind, name, task, reward in rows:
        record.add(Result(kind, name, task, reward, "x"))
    figures = summary(record, [ATTACKS["conftest"], ATTACKS["tox_ini"]], tasks)
    assert (figures["attacks"], figures["tasks"], figures["exploits"], figures["ungraded"]) == (2, 2, 1, 1)
    assert (figures["naive_exploits"], figures["gold_pass"], figures["noop_pass"]) == (1, 1.0, 0.0)
    assert figures["by_attack"] == {"conftest": 0.5, "tox_ini": 0.0}
    assert not holds(figures)
    assert holds({**figures, "exploits": 0})
    json.dumps(figures)


@pytest.mark.parametrize(
    ("name", "attacks", "says"), [("other", (), "no task set"), ("micro", ("x",), "no attack 'x'")]
)
def test_what_there_is_not_is_said(name: str, attacks: tuple[str, ...], says: str, tmp_path: Path) -> None:
    import asyncio

    work = run_audit(
        name,
        backend="bubblewrap",
        attacks=attacks,
        limit=1,
        real_tasks=0,
        naive_tasks=0,
        directory=tmp_path,
        progress=Silent(),
    )
    with pytest.raises(ConfigError, match=says):
        asyncio.run(work)


def test_a_file_of_tasks_is_audited_as_far_as_attacks_can_aim_at_its_gold_patches(tmp_path: Path) -> None:
    made = micro_task_set(MicroTasks(train=3, heldout=0, unseen=0))
    first, second, third = made.tasks
    hidden = {**made.hidden, first.id: replace(made.hidden[first.id], gold_patch="")}
    measured = {second.id: Measured(verdict="flaky")}
    save_task_set(TaskSet(made.tasks, hidden, measured), tmp_path / "mine.jsonl")
    assert [task.id for task in audit_tasks(str(tmp_path / "mine.jsonl"), 5, 7, Silent()).tasks] == [third.id]
    save_task_set(TaskSet((first,), {first.id: hidden[first.id]}), tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"no task of .*none\.jsonl has a gold patch"):
        audit_tasks(str(tmp_path / "none.jsonl"), 5, 7, Silent())


def test_text_survives_the_shell() -> None:
    import subprocess

    text = "a 'b' \"c\" $d `e` \\f\n"
    made = subprocess.run(["sh", "-c", put("/dev/stdout", text)], capture_output=True, check=True).stdout
    assert made.decode() == text
