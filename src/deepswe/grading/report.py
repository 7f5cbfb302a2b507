"""The report of a test run, out of the bytes that the runner wrote to its own channel.

One record a line: `NONCE SEQUENCE KIND STATUS ID DETAIL`, the last two in hexadecimal UTF-8 (`-` if empty).

    begin     the runner is ready and has imported nothing of the repository yet; its detail is "guarded" where code
              under test cannot end the reporter
    broken    the runner cannot work, such as without pytest
    test      the status of one test
    part      a subtest that did not pass
    fixture   an error in the clean-up after a test
    value     what a sealed test got (`deepswe.grading.sealed`), as a literal
    changed   a part of the test framework was found replaced after this test
    end       the last record; `tampered` where the code under test replaced a part of the test framework or a test
              file, `incomplete` where it left before its last test

The nonce is fresh for each run. It and the channel are in a process that runs no code under test (`runner/core.py`); a
line that does not carry it, a missing number in the sequence or a record after the end makes the report unusable.
What a record says still comes from the process that runs the tests; `deepswe.grading.sentinels` is for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STATUSES = ("passed", "xpassed", "xfailed", "skipped", "failed", "error")
"""From best to worst; the worst record of a test is its status."""
_ENDS = {
    "ok": "",
    "tampered": "the code under test meddled with the run:",
    "incomplete": "the run ended before its report was complete:",
}
_ALLOWED: Mapping[str, tuple[str, ...]] = {
    "begin": ("ok",),
    "broken": ("error",),
    "test": STATUSES,
    "part": ("failed",),
    "fixture": ("error",),
    "value": ("ok",),
    "changed": ("error",),
    "end": tuple(_ENDS),
}
"""Kind of a record -> the statuses that it may have."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run reported.

    Attributes:
        statuses: test id -> status, of the tests that were reported.
        details: test id -> one line about why it did not pass.
        started: the runner itself was ready.
        guarded: from then on, code under test could not end the reporter.
        ended: the reporter wrote its last record, whatever it says.
        problem: why the report is no complete and consistent one; "" if it is.
        broken: why the runner itself could not work; "" if it could.
        values: test id -> what it told.
    """

    statuses: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    started: bool = False
    guarded: bool = False
    ended: bool = False
    problem: str = ""
    broken: str = ""
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Record:
    kind: str
    status: str
    test: str
    detail: str


def read_report(data: bytes, nonce: str) -> Report:
    """Read a channel's bytes, whatever they are; never raises."""
    records, problem = _read_records(data, nonce)
    statuses: dict[str, str] = {}
    details: dict[str, str] = {}
    reported: set[str] = set()
    values: dict[str, list[str]] = {}
    for record in records:
        if record.kind == "value":
            values.setdefault(record.test, []).append(record.detail)
        if record.kind not in ("test", "part", "fixture"):
            continue
        if record.kind == "test" and record.test in reported:
            problem = problem or f"{record.test} was reported twice"
        if record.kind == "test":
            reported.add(record.test)
        before = statuses.get(record.test, STATUSES[0])
        statuses[record.test] = max(before, record.status, key=STATUSES.index)
        if record.detail and record.status != "passed":
            details.setdefault(record.test, record.detail)
    started = bool(records) and records[0].kind == "begin"
    broken = next((record.detail for record in records if record.kind == "broken"), "")
    guarded = started and records[0].detail == "guarded"
    ended = bool(records) and records[-1].kind == "end"
    problem = problem or _tampering(records) or _closing_problem(records)
    return Report(statuses, details, started, guarded, ended, problem, broken, values)


def _read_records(data: bytes, nonce: str) -> tuple[list[_Record], str]:
    """The records before the first line that is none, and what is wrong with that line."""
    records: list[_Record] = []
    *lines, rest = data.split(b"\n")
    for number, line in enumerate(lines):
        record = _read_record(line, nonce, number)
        if record is None:
            return records, f"line {number + 1} of the report is not a record of the runner"
        if records and records[-1].kind == "end":
            return records, "the report goes on after its end"
        records.append(record)
    return records, "the report ends within a record" if rest else ""


def _read_record(line: bytes, nonce: str, number: int) -> _Record | None:
    try:
        found, sequence, kind, status, test, detail = line.decode("ascii").split(" ")
        texts = [b"" if text == "-" else bytes.fromhex(text) for text in (test, detail)]
        test, detail = texts[0].decode("utf-8"), texts[1].decode("utf-8")
    except ValueError:
        return None
    if not nonce or found != nonce or sequence != str(number):
        return None
    if status not in _ALLOWED.get(kind, ()):
        return None
    return _Record(kind, status, test, detail)


def _tampering(records: list[_Record]) -> str:
    changed = next((record.detail for record in records if record.kind == "changed"), None)
    return "" if changed is None else f"the code under test replaced a part of the test framework: {changed}"


def _closing_problem(records: list[_Record]) -> str:
    if not records or records[0].kind != "begin":
        return "the runner did not start"
    last = records[-1]
    if last.kind != "end":
        return "the run ended before its report was complete"
    return "" if last.status == "ok" else f"{_ENDS[last.status]} {last.detail}".strip()
