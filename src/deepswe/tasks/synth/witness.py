"""A pytest plugin for runs in the fork server: selects tests and notes how each ended. Standard library only.

It is copied beside the tests as `deepswe_probe`; its state belongs to one forked child.
"""

from __future__ import annotations

import ast
import os
import sys
import time
from typing import Any

STATE: dict[str, Any] = {}


def begin(tests: list[str] | None, watch: dict[str, Any] | None, measurement: Any) -> None:
    """Start a record.

    Args:
        tests: ids to run; all if None.
        watch: {"test": id, "functions": [[absolute path, name], ...]}: in that test, how many calls lie between the
            test and the nearest of the functions.
        measurement: a running `coverage.Coverage`, told which test runs.
    """
    STATE.update(
        wanted=None if tests is None else set(tests),
        watch=watch,
        functions={tuple(item) for item in watch["functions"]} if watch else set(),
        measurement=measurement,
        statuses={},
        failures={},
        seconds={},
        distance=0,
        clock=0.0,
    )


def record() -> dict[str, Any]:
    """What was noted."""
    return {name: STATE[name] for name in ("statuses", "failures", "seconds", "distance")}


def coverage_of(measurement: Any) -> dict[str, dict[str, list[str]]]:
    """File -> line -> ids of the tests that run it."""
    data = measurement.get_data()
    found: dict[str, dict[str, list[str]]] = {}
    for file in data.measured_files():
        lines = data.contexts_by_lineno(file)
        found[file] = {str(line): [name for name in contexts if name] for line, contexts in lines.items()}
    return found


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the wanted tests."""
    wanted = STATE["wanted"]
    if wanted is not None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.failed:
        STATE["statuses"][report.nodeid] = "error"
        STATE["failures"][report.nodeid] = _failure(0, {}, [], "", str(report.longrepr)[-800:])


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """A test begins."""
    if STATE["measurement"] is not None:
        STATE["measurement"].switch_context(nodeid)
    if STATE["watch"] and STATE["watch"]["test"] == nodeid:
        sys.setprofile(_observe)
    STATE["clock"] = time.process_time()


def pytest_runtest_logreport(report: Any) -> None:
    """One phase of one test."""
    statuses = STATE["statuses"]
    if report.when == "call":
        statuses[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
    elif report.failed:
        statuses[report.nodeid] = "error"
    elif report.skipped:
        statuses[report.nodeid] = "skipped"


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """A test is over."""
    STATE["seconds"][nodeid] = round(time.process_time() - STATE["clock"], 5)
    if STATE["watch"] and STATE["watch"]["test"] == nodeid:
        sys.setprofile(None)


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Where in the test file a test failed, with which plain parameters and which words."""
    if call.excinfo is None or call.when == "teardown":
        return
    lines = [entry.lineno + 1 for entry in call.excinfo.traceback if str(entry.path) == str(item.path)]
    callspec = getattr(item, "callspec", None)
    parameters = {name: _plain(value) for name, value in callspec.params.items()} if callspec else {}
    STATE["failures"][item.nodeid] = _failure(
        lines[0] if lines and call.when == "call" else 0,
        parameters,
        list(item.fixturenames),
        call.excinfo.typename,
        _words(call.excinfo.value),
    )


def _failure(
    line: int, parameters: dict[str, str | None], fixtures: list[str], error: str, message: str
) -> dict[str, Any]:
    return {"line": line, "parameters": parameters, "fixtures": fixtures, "error": error, "message": message}


def _words(value: BaseException) -> str:
    try:
        return str(value)[:1500]
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError):
        return ""


def _observe(frame: Any, event: str, argument: Any) -> None:
    """A profile function: the fewest calls between the test and a watched function."""
    code = frame.f_code
    if event != "call" or (code.co_filename, code.co_name) not in STATE["functions"]:
        return
    test = STATE["watch"]["test"].partition("::")[0]
    steps, caller = 1, frame.f_back
    while caller is not None and not caller.f_code.co_filename.endswith(os.sep + test):
        steps, caller = steps + 1, caller.f_back
    if caller is not None and (STATE["distance"] == 0 or steps < STATE["distance"]):
        STATE["distance"] = steps


def _plain(value: Any) -> str | None:
    """The value as a literal, or None where it is none."""
    try:
        text = repr(value)
        return text if len(text) <= 2000 and ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, AttributeError, LookupError):
        return None
