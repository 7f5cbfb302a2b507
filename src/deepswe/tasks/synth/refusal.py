"""Why no task can be made from a project: one typed error with a reason that a program can read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Literal, Protocol

from deepswe.errors import BuildError

Reason = Literal[
    "not-found",
    "unsafe-archive",
    "no-tests",
    "few-tests",
    "needs-network",
    "needs-display",
    "hangs",
    "broken-tests",
    "does-not-build",
]

_WORDS: Mapping[str, re.Pattern[str]] = {
    "needs-network": re.compile(
        r"Name or service not known|Temporary failure in name resolution|Network is unreachable|gaierror|"
        r"getaddrinfo failed|NameResolutionError|Max retries exceeded|Connection refused|ConnectError",
    ),
    "needs-display": re.compile(
        r"no display name|cannot connect to X server|could not connect to display|couldn't connect to display|"
        r"TclError|DISPLAY|No available video device|Qt platform plugin|headless",
    ),
}


class ProjectRefused(BuildError):
    """A project of which no tasks can be made.

    Attributes:
        reason: the kind of trouble.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{message} [{reason}]")
        self.reason: Reason = reason


class _Failure(Protocol):
    @property
    def message(self) -> str: ...

    @property
    def error(self) -> str: ...


class _Run(Protocol):
    @property
    def failures(self) -> Mapping[str, _Failure]: ...

    @property
    def statuses(self) -> Mapping[str, str]: ...


def failure_reason(text: str) -> str:
    """Whether a failure's words speak of a missing network or display: "needs-network", "needs-display" or "other"."""
    for reason, words in _WORDS.items():
        if words.search(text):
            return reason
    return "other"


def refusal_of(name: str, run: _Run, passing: int, needed: int) -> ProjectRefused:
    """The refusal of a project with fewer tests that pass on its own code than needed, by what most failures say."""
    if not run.statuses:
        return ProjectRefused("no-tests", f"{name}: pytest finds no test in its test files")
    counts = Counter(failure_reason(f"{item.error} {item.message}") for item in run.failures.values())
    if not run.failures:
        return ProjectRefused("few-tests", f"{name} has {passing} passing tests; at least {needed} are needed")
    head = f"{name}: only {passing} of {len(run.statuses)} tests pass, and at least {needed} are needed"
    for reason, words in (("needs-network", "the network"), ("needs-display", "a display")):
        if counts[reason] and counts[reason] * 2 >= sum(counts.values()):
            kind: Reason = "needs-network" if reason == "needs-network" else "needs-display"
            return ProjectRefused(kind, f"{head}; {counts[reason]} fail for want of {words}, which tasks do not have")
    first = next(f"{test}: {item.error} {item.message}".strip() for test, item in run.failures.items())
    return ProjectRefused("broken-tests", f"{head}; the first failure is {first[:300]!r}")
