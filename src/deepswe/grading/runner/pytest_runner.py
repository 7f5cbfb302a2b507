"""Runs pytest inside the sandbox and reports each test on descriptor 3. The task's environment must hold pytest.

Standard input: the repr of (nonce, root, import directories, arguments, test ids). It is replaced by /dev/null before
any code of the repository is imported. What is reported, and how, is described in `deepswe.grading.report`.
"""

# ruff: noqa: PLC0415  (nothing may be imported before the repository is off the path)

import sys

sys.path = [entry for entry in sys.path if entry]

import os  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Report = Callable[..., None]


def read_request() -> "tuple[Any, int]":
    """The request; afterwards standard input is empty and descriptor 3 is out of the way."""
    parts = []
    while part := os.read(0, 1 << 16):
        parts.append(part)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    channel = os.dup(3)
    os.close(3)
    return eval(b"".join(parts)), channel


def make_report(nonce: str, channel: int) -> "Report":
    """A function that writes one record. The nonce lives only in its closure."""
    sequence, owner, write, getpid = 0, os.getpid(), os.write, os.getpid

    def report(kind: str, status: str, test: str = "", detail: str = "") -> None:
        nonlocal sequence
        if getpid() != owner:
            return
        texts = " ".join(text.encode("utf-8", "backslashreplace").hex() or "-" for text in (test, detail[:300]))
        data = f"{nonce} {sequence} {kind} {status} {texts}\n".encode()
        sequence += 1
        while data:
            data = data[write(channel, data) :]

    return report


def status_of(outcome: "Any") -> str:
    """pytest's outcome of one phase as a status."""
    if hasattr(outcome, "wasxfail"):
        return {"skipped": "xfailed", "passed": "xpassed"}.get(str(outcome.outcome), "failed")
    return str(outcome.outcome)


def words(outcome: "Any") -> str:
    """One line about a failure."""
    crash = getattr(outcome.longrepr, "reprcrash", None)
    return str(getattr(crash, "message", "")) or str(outcome.longrepr or "").strip()[-200:]


def make_plugin(tests: "list[str]", tell: "Report") -> "Any":
    """The plugin that selects the wanted tests and reports them."""
    wanted = set(tests)
    unbroken = dict.fromkeys(tests)

    class Plugin:
        def pytest_collection_modifyitems(self, config: "Any", items: "list[Any]") -> None:
            left_out = [item for item in items if item.nodeid not in wanted]
            items[:] = [item for item in items if item.nodeid in wanted]
            if left_out:
                config.hook.pytest_deselected(items=left_out)

        def pytest_collectreport(self, report: "Any") -> None:
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

    return Plugin()


def main() -> None:
    """Run and report."""
    (nonce, root, directories, arguments, tests), channel = read_request()
    report = make_report(nonce, channel)
    leave = os._exit
    try:
        import _pytest.python
        import _pytest.reports
        import _pytest.runner
        import pytest
    except ImportError as error:
        report("broken", "error", "", f"pytest cannot be imported: {error}")
        leave(3)
    owners: tuple[Any, ...] = (_pytest.runner, _pytest.python, _pytest.reports.TestReport, _pytest.python.Function)
    plugin = make_plugin(tests, report)
    guarded = [(owner, dict(vars(owner))) for owner in (*owners, type(plugin))]
    sys.path[:0] = [os.path.join(root, directory) for directory in directories]
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    options = ["-p", "no:cacheprovider", "-q", f"--rootdir={root}", *arguments]
    report("begin", "ok")
    code = int(pytest.main([*options, *files], plugins=[plugin]))
    same = all(vars(owner).get(name) is value for owner, before in guarded for name, value in before.items())
    report(
        "end", ("ok" if same else "tampered") if code in (0, 1, 2, 5) else "incomplete", "", f"pytest exit code {code}"
    )
    leave(0)


main()
