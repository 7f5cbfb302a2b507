"""A pytest plug-in that runs inside a task's environment and writes down what happened, as JSON.

It is copied there as text, so it imports nothing of this package and nothing beyond the standard library. The names of
the tests to keep and the file to write come from the variables DEEPSWE_PROBE_TESTS and DEEPSWE_PROBE_OUTPUT.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from typing import Any

statuses: dict[str, str] = {}
failures: dict[str, dict[str, Any]] = {}
seconds: dict[str, float] = {}
_clock = [0.0]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the wanted tests."""
    path = os.environ.get("DEEPSWE_PROBE_TESTS", "")
    if path:
        with open(path, encoding="utf-8") as stream:
            wanted = set(json.load(stream))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.failed:
        statuses[report.nodeid] = "error"


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Tell a running coverage measurement whose lines follow."""
    _clock[0] = time.perf_counter()
    measurement = sys.modules.get("coverage")
    current = measurement.Coverage.current() if measurement is not None else None
    if current is not None:
        current.switch_context(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """One phase of one test."""
    if report.when == "call":
        statuses[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
    elif report.failed:
        statuses[report.nodeid] = "error"
    elif report.skipped:
        statuses[report.nodeid] = "skipped"


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """How long it took."""
    seconds[nodeid] = time.perf_counter() - _clock[0]


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Where in the test file a test failed, and with which plain parameters."""
    if call.excinfo is None or call.when != "call":
        return
    lines = [entry.lineno + 1 for entry in call.excinfo.traceback if str(entry.path) == str(item.path)]
    callspec = getattr(item, "callspec", None)
    failures[item.nodeid] = {
        "line": lines[0] if lines else 0,
        "parameters": {name: _plain(value) for name, value in callspec.params.items()} if callspec else {},
        "fixtures": list(item.fixturenames),
    }


def pytest_sessionfinish(session: Any, exitstatus: Any) -> None:
    """Write it down."""
    output = os.environ.get("DEEPSWE_PROBE_OUTPUT", "")
    if output:
        record = {"statuses": statuses, "failures": failures, "seconds": seconds, "exit": int(exitstatus)}
        record["cpu_s"] = sum(os.times()[:4])
        with open(output, "w", encoding="utf-8") as stream:
            json.dump(record, stream)


def _plain(value: Any) -> str | None:
    """The value as a literal, or None where it is none."""
    text = repr(value)
    try:
        return text if ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
