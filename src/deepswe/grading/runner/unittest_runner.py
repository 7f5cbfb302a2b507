"""Runs unittest tests inside the sandbox. It needs the standard library alone.

It is sent behind `core.py`, whose names it uses. What is reported, and how, is described in `deepswe.grading.report`.
"""

import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deepswe.grading.runner.core import Mark, Report, Watch, fingerprint, of_builtins, request, run_split


class Deferred:
    """Stands for a module that is imported when first used: these cost half of the start and are rarely needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "Any":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if sys.modules.get(self._name) is self:  # type: ignore[comparison-overlap]
            del sys.modules[self._name]
        __import__(self._name)
        return getattr(sys.modules[self._name], attribute)


def import_unittest() -> "Any":
    """unittest, without what it does not need for running tests."""
    names = ("argparse", "difflib", "pprint", "signal", "traceback")
    for name in names:
        sys.modules[name] = Deferred(name)  # type: ignore[assignment]
    try:
        import unittest  # noqa: PLC0415
    finally:
        for name in names:
            if isinstance(sys.modules[name], Deferred):
                del sys.modules[name]
    return unittest


def import_file(path: str) -> "Any":
    """Import a test file as pytest does by default: its first directory that is no package is the import root."""
    directory, name = os.path.split(os.path.abspath(path))
    parts = [name[:-3]]
    while os.path.isfile(os.path.join(directory, "__init__.py")):
        directory, package = os.path.split(directory)
        parts.insert(0, package)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    name = ".".join(parts)
    __import__(name)
    module = sys.modules[name]
    if os.path.realpath(module.__file__ or "") != os.path.realpath(path):
        raise ImportError(f"{name} is {module.__file__}, not {path}: two test files have one name")
    return module


def words(error: BaseException) -> str:
    """One line about an exception."""
    return f"{type(error).__name__}: {error}"


def make_result_class(unittest: "Any", report: "Report") -> "Any":
    """The result object that reports."""

    class Result(unittest.TestResult):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ids: dict[int, str] = {}
            self.done: set[str] = set()
            self.last = ""
            self.broken: dict[str, tuple[str, str]] = {}
            self.watch: Any = None

        def stopTest(self, test: "Any") -> None:
            super().stopTest(test)
            self.watch.look(self.ids.get(id(test), ""))

        def _tell(self, test: "Any", status: str, detail: str = "") -> None:
            name = self.ids.get(id(test))
            if name is not None:
                self.last = name
                self.done.add(name)
                report("test", status, name, detail)
            elif status == "error" and self.last and str(test).startswith("tearDown"):
                report("fixture", status, self.last, detail)
            else:  # of a class or a module, such as "setUpClass (tests.test_a.A)"
                self.broken[str(test).partition("(")[2].rstrip(")")] = (status, detail)

        def addSuccess(self, test: "Any") -> None:
            if self.ids.get(id(test)) not in self.done:
                self._tell(test, "passed")

        def addFailure(self, test: "Any", err: "Any") -> None:
            self._tell(test, "failed", words(err[1]))

        def addError(self, test: "Any", err: "Any") -> None:
            self._tell(test, "error", words(err[1]))

        def addSkip(self, test: "Any", reason: str) -> None:
            test = getattr(test, "test_case", test)  # a skipped part skips its test
            if self.ids.get(id(test)) not in self.done:
                self._tell(test, "skipped", reason)

        def addExpectedFailure(self, test: "Any", err: "Any") -> None:
            self._tell(test, "xfailed")

        def addUnexpectedSuccess(self, test: "Any") -> None:
            self._tell(test, "xpassed")

        def addSubTest(self, test: "Any", subtest: "Any", err: "Any") -> None:
            if err is not None:
                name = self.ids.get(id(test), "")
                self.done.add(name)
                report("part", "failed", name, words(err[1]))

    return Result


def collect(unittest: "Any", path: str, wanted: "list[str]", result: "Any", report: "Report") -> "Any":
    """The wanted tests of one file, as a suite. One that is not there is reported by nobody."""
    try:
        module = import_file(path)
    except BaseException as error:  # noqa: BLE001  (also SystemExit, from the code under test)
        for test in wanted:
            report("test", "error", test, f"{path} cannot be imported: {words(error)}")
        return unittest.TestSuite()
    suite = unittest.TestSuite()
    for test in wanted:
        _, class_name, method = [*test.split("::"), "", ""][:3]
        case = getattr(module, class_name, None)
        if isinstance(case, type) and issubclass(case, unittest.TestCase) and callable(getattr(case, method, None)):
            instance = case(method)
            result.ids[id(instance)] = test
            suite.addTest(instance)
    return suite


def run_file(unittest: "Any", path: str, wanted: "list[str]", result: "Any", report: "Report", watch: "Watch") -> None:
    """Run the wanted tests of one file."""
    result.last, result.broken, result.watch = "", {}, watch
    suite = collect(unittest, path, wanted, result, report)
    watch.look(path)
    held = list(suite)
    suite.run(result)
    watch.look(path)
    for instance in held:
        test, owner = result.ids.pop(id(instance)), type(instance)
        reason = result.broken.get(f"{owner.__module__}.{owner.__qualname__}") or result.broken.get(owner.__module__)
        if test not in result.done and reason:
            report("test", reason[0], test, reason[1])


def plain(value: "Any") -> str:
    """A value as a literal, whatever its class says of itself.

    Raises:
        TypeError: it is made of something else than plain values.
    """
    kind = type(value)
    if value is None or kind is bool:
        return repr(value)
    for base in (int, float, complex, str, bytes):
        if issubclass(kind, base):
            text = base.__repr__(value)
            return text.replace("inf", "1e999") if base is float else text
    if issubclass(kind, dict):
        return "{" + ", ".join(f"{plain(key)}: {plain(item)}" for key, item in dict.items(value)) + "}"
    if issubclass(kind, list):
        return "[" + ", ".join([plain(item) for item in list.__iter__(value)]) + "]"
    if issubclass(kind, tuple):
        return "(" + "".join([plain(item) + ", " for item in tuple.__iter__(value)]) + ")"
    for group in (set, frozenset):
        if issubclass(kind, group):
            return "{" + ", ".join([plain(item) for item in group.__iter__(value)]) + "}" if len(value) else "set()"
    raise TypeError(f"a value of the class {kind.__name__}")


def make_tell(report: "Report") -> "Any":
    """The function by which a sealed test tells its value."""

    def tell(test: str, value: "Any") -> None:
        try:
            text = plain(value)
        except (TypeError, RecursionError) as error:
            text = f"<{error}>"
        report("value", "ok", test, text)

    return tell


def framework(unittest: "Any") -> "list[Mark]":
    """The fingerprint of what decides whether a test passes."""
    case = unittest.case
    owners: tuple[Any, ...] = (case, case.TestCase, case._Outcome, unittest.result.TestResult, unittest.suite.TestSuite)
    owners += (unittest.suite.BaseTestSuite, case._AssertRaisesContext, case._AssertRaisesBaseContext)
    return fingerprint(owners) + of_builtins()


def work(asked: "Any", unittest: "Any", report: "Report", state: str) -> "tuple[str, str]":
    """Run and report."""
    root, directories, _, tests = asked
    sys.path[:0] = [os.path.join(root, directory) for directory in directories]
    result_class = make_result_class(unittest, report)
    watch = Watch(framework(unittest) + fingerprint((result_class,)), report)
    result = result_class()
    vars(builtins)["__tell__"] = make_tell(report)
    report("begin", "ok", "", state)
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.split("::")[0], []).append(test)
    for path, wanted in files.items():
        run_file(unittest, os.path.join(root, path), wanted, result, report, watch)
    return ("tampered", watch.found[0]) if watch.found else ("ok", "")


run_split(request, import_unittest, work)
