"""A writer of tests without a model. It knows what the agent would be told, and what its own calls answer.

From the issue it takes the call or the code that goes wrong and the value that it should give. Then it asks the
repository, in the sandbox: examples in the docstrings of what the issue names, and what the other functions of the
same module give today, which the fix must not change. It never sees hidden tests or the solution, and it guesses no
value: what the issue names, and whatever that calls, is not asked what it gives today.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from deepswe.tasks.task import Task
from deepswe.types import ToolCall

PATH = "tests/test_issue.py"
MOST_CALLS = 3
"""Calls of each other function that are written down."""
_WANTED = re.compile(r"(?:should return|should be|should give|expected|instead of)\W{0,3}`([^`\n]+)`", re.IGNORECASE)
_INLINE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_RIGHT = re.compile(r"before|expected|correct|should|right|instead of", re.IGNORECASE)
_RIGHT_INLINE = re.compile(rf"(?:{_RIGHT.pattern})[^`\n]*`([^`\n]+)`", re.IGNORECASE)
_ERROR = re.compile(r"(\w*(?:Error|Exception|Warning|Iteration|Interrupt|Exit))(?::|$)")
NO_CALL = "no failing call in the issue"
NO_VALUE = "the issue does not say what the call should give"
NO_ERROR = "the issue wants an error that is none of Python's own"
_MARK = "SURVEY "

_SURVEY = r"""
import ast, copy, importlib, inspect, itertools, json, sys, textwrap
sys.path.insert(0, ".")
names, pool, most = {names!r}, {pool!r}, {most!r}
module = importlib.import_module({module!r})
docs, calls = [], []
for name in names:
    text = inspect.getdoc(getattr(module, name, None)) or ""
    if ">>>" in text:
        docs.append([name, text])
suspect, waiting = set(), list(names)
while waiting:
    name = waiting.pop()
    owner = getattr(module, name, None)
    if name not in suspect and (inspect.isfunction(owner) or inspect.isclass(owner)):
        suspect.add(name)
        code = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        waiting += [node.id for node in ast.walk(code) if isinstance(node, ast.Name)]
        waiting += [node.attr for node in ast.walk(code) if isinstance(node, ast.Attribute)]
def value_of(function, arguments):
    try:
        value = repr(function(*copy.deepcopy(arguments)))
        return value if repr(ast.literal_eval(value)) == value and len(value) < 200 else None
    except (ArithmeticError, AttributeError, LookupError, NameError, SyntaxError, TypeError, ValueError):
        return None
for name, function in inspect.getmembers(module, inspect.isfunction):
    kinds = [p.kind for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    plain = all(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
    if name in suspect or function.__module__ != module.__name__ or not plain or not 0 < len(kinds) < 4:
        continue
    seen = {{}}
    for arguments in itertools.islice(itertools.product(pool, repeat=len(kinds)), 300):
        value = value_of(function, arguments)
        if value is not None and value not in seen and value == value_of(function, arguments):
            seen[value] = arguments
        if len(seen) == most:
            break
    calls += [["%s(%s)" % (name, ", ".join(map(repr, a))), value] for value, a in seen.items()]
print("{mark}" + json.dumps([docs, calls[:40]]))
"""
_POOL: tuple[object, ...] = (
    3,
    0,
    [4, 1, 7],
    "ab",
    5,
    ["Ab", "cd"],
    [2, 2],
    1,
    "Cab",
    {"a": 3, "b": 5},
    "a",
    -2,
    [],
    10,
)


@dataclass(frozen=True, slots=True)
class Report:
    """What an issue says of the failure.

    Attributes:
        setup: lines that come first.
        call: the expression that goes wrong.
        wanted: what it should give, as text.
        module: where the names come from, "" if the issue does not say.
        names: that the code uses of the module.
    """

    setup: str
    call: str
    wanted: str
    module: str
    names: tuple[str, ...]


def write_by_script(task: Task) -> Generator[ToolCall, str, None]:
    """The calls of an attempt at writing tests, one a turn; it is sent each answer.

    Args:
        task: its public part.
    """
    report = read_report(task.problem_statement)
    if report is None:
        yield ToolCall("finish", {})
        return
    module = report.module
    if not module:
        answer = yield ToolCall("search", {"search_term": f"def {report.names[0]}("})
        module = _module_in(answer, task)
    if not module:
        yield ToolCall("finish", {})
        return
    script = _SURVEY.format(names=report.names, pool=_POOL, most=MOST_CALLS, module=module, mark=_MARK)
    answer = yield ToolCall("execute_bash", {"cmd": f"python3 - <<'END_OF_SURVEY'\n{script}\nEND_OF_SURVEY"})
    docs, calls = _read_survey(answer)
    text = module_text(report, module, docs, calls)
    yield ToolCall("file_editor", {"command": "create", "path": PATH, "file_text": text})
    yield ToolCall("finish", {})


def read_report(issue: str) -> Report | None:
    """The failing call or code of an issue with the value that it should give; None where it does not say both."""
    return _read_code(issue) or _read_inline(issue)


def missing_in(issue: str) -> str:
    """Why an issue has no report: `NO_CALL`, `NO_VALUE` or `NO_ERROR`; "" where it has one."""
    code = _code_of(issue)
    if read_report(issue) is not None:
        return ""
    if code is None:
        return NO_VALUE if _call_in(issue) else NO_CALL
    return NO_ERROR if _wanted_after(issue, code.end) else NO_VALUE


def _read_inline(issue: str) -> Report | None:
    wanted = _WANTED.search(issue)
    call = _call_in(issue)
    if wanted is None or not call or not _is_expression(wanted[1]):
        return None
    path = re.search(r"([\w/]+)\.py\b", issue)
    return Report("", call, wanted[1], path[1].replace("/", ".") if path else "", (_called(call),))


def _call_in(issue: str) -> str:
    """The first inline code that is a call, or ""."""
    return next((text for text in _INLINE.findall(issue) if _called(text)), "")


@dataclass(frozen=True, slots=True)
class _Code:
    """The first block of code of an issue: an import, statements, the expression that is shown, and where it ends."""

    imported: ast.ImportFrom
    setup: tuple[ast.stmt, ...]
    shown: ast.Expr
    end: int


def _read_code(issue: str) -> Report | None:
    code = _code_of(issue)
    wanted = _wanted_after(issue, code.end) if code else ""
    if code is None or not wanted or (_ERROR.match(wanted) and not _error_in(wanted)):
        return None
    setup = "\n".join(ast.unparse(node) for node in code.setup)
    names = tuple(alias.name for alias in code.imported.names if alias.name != "*")
    return Report(setup, ast.unparse(code.shown), wanted, str(code.imported.module), names)


def _code_of(issue: str) -> _Code | None:
    fences = list(_FENCE.finditer(issue))
    code = next((found for found in fences if found[1] in ("python", "pycon", "py")), None)
    if code is None:
        return None
    lines = code[2].rstrip().split("\n")
    if ">>> " in code[2]:
        lines = [line[4:] for line in code[2].split("\n") if line[:4] in (">>> ", "... ")]
    try:
        body = ast.parse("\n".join(lines)).body
    except SyntaxError:
        return None
    imported = next((node for node in body if isinstance(node, ast.ImportFrom) and node.module), None)
    if imported is None or not isinstance(body[-1], ast.Expr):
        return None
    return _Code(imported, tuple(body[:-1]), body[-1], code.end())


def _wanted_after(issue: str, start: int) -> str:
    """The value after the first words that speak of what is right: a fenced block, or code in the line."""
    for found in _FENCE.finditer(issue):
        words = issue[: found.start()].rstrip().rpartition("\n")[2]
        if found.start() >= start and _RIGHT.search(words):
            return found[2].strip()
    code = _RIGHT_INLINE.search(issue, start)
    return code[1].strip() if code else ""


def _error_in(wanted: str) -> str:
    """The name of the error of Python's own that is wanted, such as "ValueError: percent" says; "" if none is."""
    name = _ERROR.match(wanted)
    kind = getattr(builtins, name[1], None) if name else None
    return kind.__name__ if isinstance(kind, type) and issubclass(kind, Exception) else ""


def _called(text: str) -> str:
    """The name of the function that an expression calls, or ""."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _is_expression(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _module_in(answer: str, task: Task) -> str:
    """The module of the first file that an answer of `search` names."""
    found = re.search(r"^(\S+)\.py \(", answer, re.MULTILINE)
    path = found[1] if found else ""
    roots = [root.strip("./") + "/" for root in task.repository.pythonpath if root.strip("./")]
    root = next((root for root in roots if path.startswith(root)), "")
    return path.removeprefix(root).replace("/", ".")


def _read_survey(answer: str) -> tuple[list[list[str]], list[list[str]]]:
    line = next((line for line in answer.split("\n") if line.startswith(_MARK)), "")
    try:
        docs, calls = json.loads(line.removeprefix(_MARK))
    except ValueError:
        return [], []
    return docs, calls


def module_text(report: Report, module: str, docs: Sequence[Sequence[str]], calls: Sequence[Sequence[str]]) -> str:
    """A unittest module: the case of the issue, the docstrings' examples, and what the neighbours give today."""
    names = sorted({*report.names, *(call.partition("(")[0] for call, _ in calls)})
    lines = ["import doctest", "import unittest", "", f"import {module}"]
    lines += [f"from {module} import {name}" for name in names]
    lines += ["", "", "class IssueTest(unittest.TestCase):", "    def test_issue(self):"]
    lines += [f"        {line}" for line in report.setup.split("\n") if line]
    if error := _error_in(report.wanted):
        lines += [f"        with self.assertRaises({error}):", f"            {report.call}"]
    elif _is_expression(report.wanted):
        lines.append(f"        self.assertEqual({report.call}, {report.wanted})")
    else:
        lines.append(f"        self.assertEqual(repr({report.call}), {report.wanted!r})")
    for number, (name, text) in enumerate(docs):
        lines += ["", f"    def test_documented_{number}(self):", f"        text = {text!r}"]
        lines.append(
            f"        test = doctest.DocTestParser().get_doctest(text, vars({module}).copy(), {name!r}, None, 0)"
        )
        lines.append("        runner = doctest.DocTestRunner(verbose=False)")
        lines.append("        runner.run(test, out=lambda words: None)")
        lines.append("        self.assertEqual(runner.failures, 0)")
    for number, (call, value) in enumerate(calls):
        lines += ["", f"    def test_stays_{number}(self):", f"        self.assertEqual({call}, {value})"]
    return "\n".join(lines) + "\n"
