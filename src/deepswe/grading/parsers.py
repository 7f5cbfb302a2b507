"""Verdicts out of the log of a source's own test script, as its benchmark defines them.

A log is printed by the code under test, so it can be forged, which the structured report of `deepswe.grading.report`
makes much harder. These parsers are for sources whose verdict is defined over a log; nothing else uses them.

How a status counts, by parser (one table, `COUNTS`, and the exceptions that a task's `HiddenTests.expected` makes):

    passed, xfailed     right, for F2P and for P2P
    skipped             right for P2P alone: a test that is skipped has not been solved
    xpassed             wrong
    failed, error       wrong
    missing             wrong
    in `expected`       right if and only if it is that very status

A test that is reported more than once has its worst status ("pytest"), also where an error of its teardown follows its
pass; a failing subtest fails its test. R2E-Gym has its own rule: the map of all results must be the expected one, and
of results with the same key the last one counts. SWE-bench's verdict is the official package's.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from deepswe.errors import GradingError
from deepswe.grading.report import STATUSES
from deepswe.tasks.sources_harbor import MARKER, TEST
from deepswe.tasks.sources_swe import END, EXIT_CODE, START
from deepswe.tasks.task import HiddenTests, Task

WORDS = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
    "XPASS": "xpassed",
}
"""pytest's word -> our status."""
COUNTS: Mapping[str, frozenset[str]] = {
    "fail_to_pass": frozenset({"passed", "xfailed"}),
    "pass_to_pass": frozenset({"passed", "xfailed", "skipped"}),
}
"""The statuses of a log that count as right, by the list that a test is in."""
_WORD = "|".join(WORDS)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LEADING = re.compile(rf"(?:\[gw\d+\] \[\s*\d+%\] )?(?P<word>{_WORD}) (?P<rest>.+?)\s*$")
_TRAILING = re.compile(rf"(?P<rest>\S.*?) (?P<word>{_WORD})(?: \(.*\))?(?:\s+\[\s*\d+%\])?\s*$")
_SUBTEST = re.compile(r"(?:(?P<before>\S.*?) )?SUBFAIL(?:ED)?(?:\[.*?\]|\(.*?\))*(?: (?P<after>.+?))?\s*$")
_SUMMARY = "short test summary info"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a log says.

    Attributes:
        statuses: graded test -> status, "missing" where the log does not say.
        right: the graded tests whose status counts.
        problem: why the log as a whole gives no reward; "" if it may.
    """

    statuses: Mapping[str, str]
    right: frozenset[str]
    problem: str = ""


Parser = Callable[[str, Task, HiddenTests], Reading]


def read_log(log: str, task: Task, hidden: HiddenTests) -> Reading:
    """Read a whole log with the task's parser.

    Raises:
        GradingError: the parser is unknown or cannot be loaded, or the script did not come as far as its tests.
    """
    name = hidden.parser.partition(":")[0]
    if name not in PARSERS:
        raise GradingError(f"task {task.id} has the unknown parser {hidden.parser!r}; there are {', '.join(PARSERS)}")
    if START in hidden.script and START not in log:
        raise GradingError(f"the test script did not come as far as its tests; the log ends {log[-300:]!r}")
    return PARSERS[name](log, task, hidden)


def judge(found: Mapping[str, str], hidden: HiddenTests, problem: str = "") -> Reading:
    """Apply the table to the statuses that a log gave.

    Args:
        found: test -> status.
        hidden: the graded tests and what is expected of them.
        problem: of the log as a whole.
    """
    statuses = {test: found.get(test, "missing") for test in hidden.tests}
    fail_to_pass = set(hidden.fail_to_pass)

    def counts(test: str, status: str) -> bool:
        if test in hidden.expected:
            return status == hidden.expected[test]
        return status in COUNTS["fail_to_pass" if test in fail_to_pass else "pass_to_pass"]

    return Reading(statuses, frozenset(test for test, status in statuses.items() if counts(test, status)), problem)


def pytest_statuses(log: str, known: frozenset[str]) -> dict[str, str]:
    """Status of each test in pytest's output: verbose lines, the summary of `-rA`, xdist's lines, subtests.

    Args:
        log: the output, with or without the markers around it.
        known: full node ids that may hold spaces, colons, brackets and " - "; they tell where an id ends.
    """
    statuses: dict[str, str] = {}

    def note(test: str, status: str) -> None:
        statuses[test] = max(statuses.get(test, status), status, key=STATUSES.index)

    for line in _COLOUR.sub("", _between(log)).split("\n"):
        if match := _LEADING.match(line):
            test, status = _cut(match["rest"], known), WORDS[match["word"]]
            if status == "error" and "::" not in test:
                for other in known:
                    if other.startswith(f"{test}::"):
                        note(other, status)
            else:
                note(test, status)
        elif (match := _TRAILING.match(line)) and (match["rest"] in known or " " not in match["rest"]):
            note(match["rest"], WORDS[match["word"]])
        elif match := _SUBTEST.match(line):
            for text in (match["after"], match["before"]):
                test = _cut(text, known) if text else ""
                test = test if test in known else re.sub(r" (?:\[.*\]|\(.*\))$", "", test)
                if test in known:
                    note(test, "failed")
    return statuses


def _between(log: str) -> str:
    """What stands between the markers; all of it where there are none."""
    return log.partition(START)[2].partition(END)[0] if START in log else log


def _cut(rest: str, known: frozenset[str]) -> str:
    """The id that a line of the summary begins with: "id" or "id - message"."""
    if rest in known:
        return rest
    place = len(rest)
    while (place := rest.rfind(" - ", 0, place)) >= 0:
        if rest[:place] in known:
            return rest[:place]
    return rest.split(" - ")[0]


def _read_pytest(log: str, task: Task, hidden: HiddenTests) -> Reading:
    found = pytest_statuses(log, frozenset(hidden.tests))
    code = re.search(rf"{EXIT_CODE}:\s*(-?\d+)", log.partition(END)[2])
    contradicted = code is not None and code[1] != "0" and not {"failed", "error"} & set(found.values())
    problem = f"the tests ended with exit code {code[1]}, and the log shows no failure" if code and contradicted else ""
    return judge(found, hidden, problem)


def r2e_statuses(log: str, known: frozenset[str]) -> dict[str, str]:
    """R2E-Gym's map of a log: the node id without its file, joined by ".", -> status; out of pytest's summary."""
    statuses = {}
    for line in _COLOUR.sub("", log).partition(_SUMMARY)[2].split("\n"):
        match = re.match(r"(PASSED|FAILED|ERROR) (.+?)\s*$", line)
        if match and "::" in match[2]:
            key = ".".join(match[2].split("::")[1:])
            statuses[_cut(key, known)] = WORDS[match[1]]
    return statuses


def _read_r2e(log: str, task: Task, hidden: HiddenTests) -> Reading:
    found = r2e_statuses(log, frozenset(hidden.tests))
    more = [test for test in found if test not in set(hidden.tests)]
    problem = f"{len(more)} tests were reported that are not expected: {more[0]}" if more else ""
    expected = {test: hidden.expected.get(test, "passed") for test in hidden.tests}
    statuses = {test: found.get(test, "missing") for test in hidden.tests}
    return Reading(statuses, frozenset(test for test in expected if statuses[test] == expected[test]), problem)


def _read_harbor(log: str, task: Task, hidden: HiddenTests) -> Reading:
    said = re.findall(rf"^{MARKER} (.*)$", log, re.MULTILINE)
    if not said:
        return judge({}, hidden, "the verifier left no reward")
    numbers = re.findall(r"(?:^|\"reward\"\s*:\s*)(-?\d+(?:\.\d+)?)", said[-1].strip())
    return judge({TEST: "passed" if numbers and float(numbers[0]) >= 1 else "failed"}, hidden)


def _read_swebench(log: str, task: Task, hidden: HiddenTests) -> Reading:
    if START not in hidden.script:
        log = f"{START}\n{log}\n{END}\n"
    official = SwebenchReport.of(log, task, hidden)
    if official.infrastructure:
        raise GradingError(f"swebench found that the environment failed: {official.infrastructure}")
    statuses = {test: WORDS.get(official.words.get(test, ""), "missing") for test in hidden.tests}
    problem = "" if official.read else "swebench finds no test results in the log"
    return Reading(statuses, official.right, problem)


PARSERS: Mapping[str, Parser] = {
    "pytest": _read_pytest,
    "r2e-gym": _read_r2e,
    "harbor": _read_harbor,
    "swebench": _read_swebench,
}


@dataclass(frozen=True, slots=True)
class SwebenchReport:
    """The official verdict on one log.

    Attributes:
        read: the log held test results.
        resolved: as the package decides it.
        right: the tests that it counts as a success.
        words: test -> the parser's word.
        infrastructure: why the environment failed, where the package says so; else "".
    """

    read: bool
    resolved: bool
    right: frozenset[str]
    words: Mapping[str, str]
    infrastructure: str = ""

    @classmethod
    def of(cls, log: str, task: Task, hidden: HiddenTests) -> SwebenchReport:
        """Ask the `swebench` package, 4 or 5.

        Raises:
            GradingError: it is not installed, or has no parser for the task.
        """
        grading = _swebench("grading")
        spec = _spec(task, hidden)
        prediction = {"instance_id": task.id, "model_name_or_path": "deepswe", "model_patch": "-"}
        with tempfile.TemporaryDirectory(prefix="deepswe-log-") as directory:
            path = Path(directory) / "test_output.txt"
            path.write_text(log, encoding="utf-8")
            try:
                report = grading.get_eval_report(spec, prediction, str(path), include_tests_status=True)[task.id]
                words, read = grading.get_logs_eval(spec, str(path))
            except KeyError as error:
                raise GradingError(f"swebench knows no parser or version for task {task.id}: {error}") from error
        tests = report.get("tests_status", {})
        right = [test for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in tests.get(kind, {}).get("success", ())]
        infrastructure = report.get("infra_failure_reason", "unknown") if report.get("infra_failure") else ""
        return cls(bool(read), bool(report["resolved"]), frozenset(right), words, infrastructure)


def _spec(task: Task, hidden: HiddenTests) -> Any:
    """The package's own description of a task, as much of it as grading reads."""
    lists = {"FAIL_TO_PASS": list(hidden.fail_to_pass), "PASS_TO_PASS": list(hidden.pass_to_pass)}
    common = {"instance_id": task.id, "repo": task.repo, "version": task.tags.get("version", ""), **lists}
    scripts = {"eval_script_list": hidden.script.split("\n")}
    if _swebench_is_5():
        parsers = _swebench("log_parsers.python")
        name = hidden.parser.partition(":")[2]
        if not name and task.repo in parsers.MAP_REPO_TO_PARSER_PY:
            name = parsers.MAP_REPO_TO_PARSER_PY[task.repo].__name__
        if name not in _swebench("log_parsers").PARSER_REGISTRY:
            raise GradingError(f"task {task.id} names no log parser of swebench ({name!r}), and {task.repo} has none")
        image = task.image.name if task.image else ""
        kind = task.tags.get("eval_type", "pass_and_fail")
        return _swebench("types").TestSpec(**common, **scripts, image=image, log_parser=name, eval_type=kind)
    more = {"repo_script_list": [], "env_script_list": [], "arch": "x86_64", "language": "py", "docker_specs": {}}
    return _swebench("test_spec.test_spec").TestSpec(**common, **scripts, **more, namespace=None)


def _swebench_is_5() -> bool:
    spec = importlib.util.find_spec("swebench")
    return spec is not None and (Path((spec.submodule_search_locations or [""])[0]) / "types.py").exists()


def _swebench(name: str) -> Any:
    """A module of the package (of `harness` unless it is "types"), without what its `__init__` files pull in.

    Raises:
        GradingError: it is not installed, or lacks something that this module needs.
    """
    full = "swebench.types" if name == "types" else f"swebench.harness.{name}"
    if full in sys.modules:
        return sys.modules[full]
    try:
        with _bare_packages("swebench", "swebench.harness"):
            return importlib.import_module(full)
    except ImportError as error:
        raise GradingError(
            f"SWE-bench tasks are graded by the swebench package, which cannot be imported ({error}); "
            "pip install --no-deps swebench unidiff"
        ) from error


@contextmanager
def _bare_packages(*names: str) -> Iterator[None]:
    """Let packages that are not imported yet stand as bare directories, their `__init__` not run, for a while."""
    made = []
    for name in names:
        if name in sys.modules:
            continue
        parent, _, child = name.rpartition(".")
        if parent:
            place = [f"{entry}/{child}" for entry in sys.modules[parent].__path__]
        else:
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ImportError(f"no module named {name!r}")
            place = list(spec.submodule_search_locations or ())
        module = ModuleType(name)
        module.__path__ = place
        sys.modules[name] = module
        made.append(name)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
