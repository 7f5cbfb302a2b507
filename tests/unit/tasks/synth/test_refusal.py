"""A refused project is told what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from deepswe.tasks.synth.refusal import refusal_of


@dataclass
class Failure:
    message: str
    error: str


@dataclass
class Run:
    statuses: Mapping[str, str]
    failures: Mapping[str, Failure] = field(default_factory=dict)


PASSED = {f"test_{number}": "passed" for number in range(4)}


@pytest.mark.parametrize(
    ("run", "reason", "words"),
    [
        (Run({}), "no-tests", "shop: pytest finds no test in its test files"),
        (Run(PASSED), "few-tests", "shop has 4 passing tests; at least 5 are needed"),
        (Run({**PASSED, "test_slow": "skipped"}), "few-tests", "shop has 4 passing tests; at least 5 are needed"),
        (
            Run({**PASSED, "test_x": "failed"}, {"test_x": Failure("1 != 2", "AssertionError")}),
            "broken-tests",
            "only 4 of 5 tests pass, and at least 5 are needed; the first failure is 'test_x: AssertionError 1 != 2'",
        ),
        (
            Run({**PASSED, "test_x": "failed"}, {"test_x": Failure("Connection refused", "OSError")}),
            "needs-network",
            "only 4 of 5 tests pass, and at least 5 are needed; 1 fail for want of the network",
        ),
    ],
)
def test_the_true_reason_is_told(run: Run, reason: str, words: str) -> None:
    refused = refusal_of("shop", run, 0 if not run.statuses else 4, 5)
    assert refused.reason == reason
    assert words in str(refused)
