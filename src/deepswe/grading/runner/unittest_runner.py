"""Runs unittest tests inside the sandbox and reports each on descriptor 3. It needs the standard library alone.

Standard input: the repr of (nonce, root, import directories, arguments, test ids). It is replaced by /dev/null before
any code of the repository is imported. What is reported, and how, is described in `deepswe.grading.report`.
"""

# ruff: noqa: PLC0415  (nothing may be imported before the repository is off the path, and start-up is the cost here)

import sys

sys.path = [entry for entry in sys.path if entry]

import os  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Report = Callable[..., None]


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


def import_unittest() -> "Any":
    """unittest, without what it does not need for running tests."""
    names = ("argparse", "difflib", "pprint", "signal", "traceback")
    for name in names:
        sys.modules[name] = Deferred(name)  # type: ignore[assignment]
    try:
        import unittest
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


def run_file(unittest: "Any", path: str, wanted: "list[str]", result: "Any", report: "Report") -> None:
    """Run the wanted tests of one file."""
    result.last, result.broken = "", {}
    suite = collect(unittest, path, wanted, result, report)
    held = list(suite)
    suite.run(result)
    for instance in held:
        test, owner = result.ids.pop(id(instance)), type(instance)
        reason = result.broken.get(f"{owner.__module__}.{owner.__qualname__}") or result.broken.get(owner.__module__)
        if test not in result.done and reason:
            report("test", reason[0], test, reason[1])


def main() -> None:
    """Run and report."""
    (nonce, root, directories, _, tests), channel = read_request()
    report = make_report(nonce, channel)
    unittest = import_unittest()
    leave = os._exit
    guarded = [(owner, dict(vars(owner))) for owner in (unittest.TestCase, unittest.TestResult, unittest.TestSuite)]
    sys.path[:0] = [os.path.join(root, directory) for directory in directories]
    result_class = make_result_class(unittest, report)
    guarded.append((result_class, dict(vars(result_class))))
    result = result_class()
    report("begin", "ok")
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.split("::")[0], []).append(test)
    for path, wanted in files.items():
        run_file(unittest, os.path.join(root, path), wanted, result, report)
    same = all(vars(owner).get(name) is value for owner, before in guarded for name, value in before.items())
    report("end", "ok" if same else "tampered")
    leave(0)


main()
