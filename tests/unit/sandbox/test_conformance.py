"""The runner of the checks; the checks themselves run on a live backend in tests/integration."""

import asyncio
import random

import pytest

from deepswe.errors import ConfigError, SandboxDied, SandboxUnsupported
from deepswe.sandbox import conformance
from deepswe.sandbox.checks import Check, Ground, Refused, expect


def outcome(error=None):
    async def body(ground):
        if error is not None:
            raise error

    verdict = asyncio.run(conformance.run_check(Check("g", "name", body), Ground(None, "secret")))
    return verdict.check, verdict.outcome, verdict.reason


def test_each_check_passes_fails_with_a_reason_or_is_refused():
    assert outcome() == ("g.name", "passed", "")
    assert outcome(Refused("no disk limit")) == ("g.name", "refused", "no disk limit")
    assert outcome(SandboxUnsupported("no layers")) == ("g.name", "refused", "no layers")
    assert outcome(SandboxDied("gone")) == ("g.name", "failed", "SandboxDied: gone")
    assert outcome(KeyError("x"))[1] == "failed"
    with pytest.raises(AssertionError, match="it is so"):
        expect(False, "it is so")


def test_a_check_that_hangs_fails(monkeypatch):
    monkeypatch.setattr(conformance, "CHECK_S", 0.05)

    async def body(ground):
        await asyncio.sleep(60)

    verdict = asyncio.run(conformance.run_check(Check("g", "n", body), Ground(None, "s")))
    assert (verdict.outcome, verdict.reason) == ("failed", "it took more than 0 s")


def test_checks_are_chosen_by_name_and_group():
    everything = conformance.select((), quick=False)
    quick = conformance.select((), quick=True)
    assert len(everything) > len(quick) > 40
    assert len({(check.group, check.name) for check in everything}) == len(everything)
    name = random.Random(1).choice([check.name for check in everything if check.heavy])
    assert [check.name for check in conformance.select((name,), quick=True)] == [name]
    assert {check.group for check in conformance.select(("files",), quick=False)} == {"files"}
    with pytest.raises(ConfigError, match="no check is named 'file'; the groups are exec, files"):
        conformance.select(("file",), quick=False)
