"""Runs pytest inside the sandbox. The task's environment must hold it.

It is sent behind `core.py`, whose names it uses. What is reported, and how, is described in `deepswe.grading.report`.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deepswe.grading.runner.core import Mark, Report, Watch, fingerprint, of_builtins, request, run_split

MODULES = (
    *("_pytest.assertion.rewrite", "_pytest.assertion.util", "_pytest.fixtures", "_pytest.main", "_pytest.nodes"),
    *(
        "_pytest.outcomes",
        "_pytest.python",
        "_pytest.python_api",
        "_pytest.raises",
        "_pytest.reports",
        "_pytest.runner",
    ),
    *("_pytest.skipping", "_pytest.unittest", "pluggy._callers", "pluggy._hooks", "pluggy._manager", "unittest.case"),
    *("unittest.suite", "unittest.result"),
)
"""What decides whether a test passes; a version may lack some."""


def status_of(outcome: "Any") -> str:
    """pytest's outcome of one phase as a status."""
    if hasattr(outcome, "wasxfail"):
        return {"skipped": "xfailed", "passed": "xpassed"}.get(str(outcome.outcome), "failed")
    return str(outcome.outcome)


def words(outcome: "Any") -> str:
    """One line about a failure."""
    crash = getattr(outcome.longrepr, "reprcrash", None)
    return str(getattr(crash, "message", "")) or str(outcome.longrepr or "").strip()[-200:]


def framework() -> "list[Mark]":
    """The fingerprint of what decides whether a test passes."""
    modules = [sys.modules[name] for name in MODULES if name in sys.modules]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return fingerprint([*modules, *classes]) + of_builtins()


def foreign(marks: "list[Mark]", root: str) -> "list[str]":
    """Parts of the framework that code of the repository replaced while plugins were loaded."""
    found = []
    for label, held, name, _ in marks:
        value = held.get(name) if name else held
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if code is not None and code.co_filename.startswith(root + os.sep):
            found.append(label)
    return found


def make_plugin(root: str, tests: "list[str]", tell: "Report", watch: "Watch") -> "Any":
    """The plugin that selects the wanted tests and reports them."""
    import pytest  # noqa: PLC0415

    wanted = set(tests)
    unbroken = dict.fromkeys(tests)

    class Plugin:
        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self) -> None:
            """The plugins of the environment are loaded, the code of the repository is not: from here on all stays."""
            watch.found = foreign(watch.marks, root)
            if watch.found:
                tell("changed", "error", "", watch.found[0])
            watch.marks = framework() + fingerprint([type(self)])

        def pytest_collection_modifyitems(self, config: "Any", items: "list[Any]") -> None:
            left_out = [item for item in items if item.nodeid not in wanted]
            items[:] = [item for item in items if item.nodeid in wanted]
            if left_out:
                config.hook.pytest_deselected(items=left_out)

        def pytest_collectreport(self, report: "Any") -> None:
            watch.look(report.nodeid)
            if report.failed:
                for test in list(unbroken):
                    if not report.nodeid or test == report.nodeid or test.startswith(report.nodeid + "::"):
                        del unbroken[test]
                        tell("test", "error", test, words(report))

        def pytest_runtest_logreport(self, report: "Any") -> None:
            status = status_of(report)
            if hasattr(report, "context"):
                if status == "failed":
                    tell("part", "failed", report.nodeid, words(report))
            elif report.when == "setup":
                if status != "passed":
                    tell("test", "error" if status == "failed" else status, report.nodeid, words(report))
            elif report.when == "call":
                tell("test", status, report.nodeid, words(report) if status == "failed" else "")
            elif status == "failed":
                tell("fixture", "error", report.nodeid, words(report))
            if report.when == "teardown":
                watch.look(report.nodeid)

    return Plugin()


def prepare() -> "Any":
    """pytest, and what it would import later, when files of the repository could stand in for that."""
    import unittest  # noqa: F401, PLC0415

    import pytest  # noqa: PLC0415

    return pytest


def work(asked: "Any", pytest: "Any", report: "Report", state: str) -> "tuple[str, str]":
    """Run and report."""
    root, directories, arguments, tests = asked
    watch = Watch(framework(), report)
    plugin = make_plugin(root, tests, report, watch)
    sys.path[:0] = [os.path.join(root, directory) for directory in directories]
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    options = ["-p", "no:cacheprovider", "-q", f"--rootdir={root}", *arguments, "--maxfail=0"]
    report("begin", "ok", "", state)
    code = int(pytest.main([*options, *files], plugins=[plugin]))
    watch.look("")
    if watch.found:
        return "tampered", watch.found[0]
    return "ok" if code in (0, 1, 2, 5) else "incomplete", f"pytest exit code {code}"


run_split(request, prepare, work)
