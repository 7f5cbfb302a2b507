from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deepswe.audit.run import RECORD, run_audit
from deepswe.progress import Silent

FEW = ("exit_on_import", "stack_frames", "subclass_equal", "git_log_all", "escaped_names")


def test_a_small_audit_shows_real_attacks_that_get_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepswe.audit import run

    monkeypatch.setattr(run, "HONEST", [case for case in run.HONEST if case.name in ("crlf", "fork", "own_equality")])
    arguments = {
        "backend": "bubblewrap",
        "attacks": FEW,
        "limit": 1,
        "real_tasks": 0,
        "naive_tasks": 1,
        "directory": tmp_path,
        "progress": Silent(),
    }
    figures = asyncio.run(run_audit("micro", **arguments))  # type: ignore[arg-type]
    assert (figures["attacks"], figures["tasks"], figures["exploits"], figures["ungraded"]) == (5, 1, 0, 0)
    assert set(figures["naive_rewarded"]) == {"exit_on_import", "stack_frames", "subclass_equal", "git_log_all"}
    assert (figures["naive_gold"], figures["naive_noop"]) == (1.0, 0.0)
    assert (figures["gold_pass"], figures["noise_pass"], figures["noop_pass"], figures["empty_pass"]) == (1, 1, 0, 0)
    assert (figures["legitimate"], figures["legitimate_pass"]) == (3, 1.0)
    written = (tmp_path / RECORD).read_bytes()
    assert asyncio.run(run_audit("micro", **arguments)) == figures  # type: ignore[arg-type]
    assert (tmp_path / RECORD).read_bytes() == written
