"""Issue texts without a model: one failing case, taken out of its test and replayed as a stranger would report it.

A case is a few statements and one expression. It is run on the original and on the mutated code; what the two give is
what the issue expects and sees. No text names a test, a file of tests or the place of the bug.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_MAX_STATEMENTS = 8
_MAX_CODE = 900
_MAX_VALUE = 500
_MAX_HELPER_LINES = 15
_EQUALITIES = frozenset(
    {"assertEqual", "assertEquals", "assertTrue", "assertFalse", "assertIs", "assertIn", "eq_", "raises"}
)
_WRAPPERS = frozenset(
    {
        "list",
        "tuple",
        "set",
        "dict",
        "str",
        "repr",
        "len",
        "sorted",
        "next",
        "hash",
        "iter",
        "bool",
        "type",
        "isinstance",
    }
)


@dataclass(frozen=True, slots=True)
class Case:
    """What a reporter would run.

    Attributes:
        setup: imports first, then statements.
        expression: what is looked at, one expression or one statement.
    """

    setup: tuple[str, ...]
    expression: str

    @property
    def code(self) -> str:
        """All of it, as one would paste it."""
        return "\n".join([*self.setup, self.expression])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case gives: the repr of a value, or an error as "Type: message"; `text` is a value that is a string."""

    value: str = ""
    error: str = ""
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """A case with what it should give and what it gives."""

    case: Case
    expected: Outcome
    actual: Outcome
    documentation: str = ""
    version: str = ""
    project: str = ""


def extract_case(
    module: str, test: str, line: int, parameters: Mapping[str, str | None], support: Sequence[str]
) -> Case | None:
    """Take the failing case out of a test, or None where it cannot stand alone.

    Args:
        module: text of the test file.
        test: id of the failing test.
        line: the line in the file at which it failed.
        parameters: literals of its parameters.
        support: names of modules that only tests can import.
    """
    tree = _parsed(module)
    function = _find(tree, test.partition("[")[0].split("::")[1:])
    if function is None or any(value is None for value in parameters.values()):
        return None
    wanted = {item.arg for item in function.args.args} - {"self"}
    if wanted - set(parameters):
        return None
    literals = {name: ast.parse(value or "None", mode="eval").body for name, value in parameters.items()}
    body = [_substitute(statement, literals) for statement in function.body]
    place = next((at for at, item in enumerate(body) if item.lineno <= line <= (item.end_lineno or item.lineno)), None)
    if place is None:
        return None
    shown = _shown(body[place], line)
    if shown is None:
        return None
    return _assemble(tree, body[:place], shown, support)


def _find(tree: ast.AST, names: Sequence[str]) -> ast.FunctionDef | None:
    node: ast.AST | None = tree
    for name in names:
        children = ast.iter_child_nodes(node) if node is not None else iter(())
        node = next((c for c in children if isinstance(c, ast.FunctionDef | ast.ClassDef) and c.name == name), None)
    return node if isinstance(node, ast.FunctionDef) else None


class _Literals(ast.NodeTransformer):
    def __init__(self, literals: Mapping[str, ast.expr]) -> None:
        self.literals = literals

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id in self.literals:
            return ast.copy_location(copy.deepcopy(self.literals[node.id]), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        arguments: list[ast.expr] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.List | ast.Tuple):
                arguments += argument.value.elts
            else:
                arguments.append(argument)
        node.args = arguments
        return node


def _substitute(statement: ast.stmt, literals: Mapping[str, ast.expr]) -> ast.stmt:
    changed: ast.stmt = _Literals(literals).visit(copy.deepcopy(statement))
    return changed


def _shown(statement: ast.stmt, line: int) -> ast.expr | None:
    """The expression of a failing statement that a reporter would look at."""
    match statement:
        case ast.Assert(test=test):
            return _side(test)
        case ast.With(items=[item], body=[inner]) if _call_name(item.context_expr) == "raises":
            return _value(inner)
        case ast.With():
            return None
        case ast.Expr(value=ast.Call() as call) if _call_name(call) in _EQUALITIES:
            sides = [argument for argument in call.args if _calls(argument)]
            return _side(sides[0]) if sides else None
        case _:
            return _value(statement)


def _value(statement: ast.stmt) -> ast.expr | None:
    return statement.value if isinstance(statement, ast.Expr | ast.Assign) else None


def _side(test: ast.expr) -> ast.expr:
    match test:
        case ast.Compare(left=left, comparators=[right]):
            if _calls(left) or not _calls(right):
                return left if not isinstance(left, ast.Constant) else right
            return right
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Call(func=ast.Name(id="all" | "any"), args=[ast.GeneratorExp()]):
            return test
        case _:
            return test


def _calls(node: ast.AST) -> bool:
    return any(isinstance(item, ast.Call) and _call_name(item) != "approx" for item in ast.walk(node))


def _call_name(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return node.func.attr
        if isinstance(node.func, ast.Name):
            return node.func.id
    return ""


def _assemble(tree: ast.Module, before: Sequence[ast.stmt], shown: ast.expr, support: Sequence[str]) -> Case | None:
    kept, shown, needed = _slice(before, shown)
    imports, helpers = _module_level(tree, needed, support)
    if imports is None:
        return None
    statements = [*helpers, *(ast.unparse(statement) for statement in kept)]
    case = Case((*imports, *statements), ast.unparse(shown))
    words = {node.id for node in ast.walk(ast.parse(case.code)) if isinstance(node, ast.Name)}
    if len(statements) > _MAX_STATEMENTS or len(case.code) > _MAX_CODE or not _calls(ast.parse(case.code)):
        return None
    if words & {"self", "pytest", "monkeypatch", "mock", "unittest"} or "test_" in case.code or "Test" in case.code:
        return None
    return case


def _slice(before: Sequence[ast.stmt], shown: ast.expr) -> tuple[list[ast.stmt], ast.expr, set[str]]:
    """The statements that the expression depends on, backwards; a name that was just assigned is put in its place."""
    last = before[-1] if before else None
    match last, shown:
        case ast.Assign(targets=[ast.Name(id=target)], value=value), ast.Name(id=name) if target == name:
            before, shown = before[:-1], value
        case _:
            pass
    needed, kept = _names(shown), list[ast.stmt]()
    for statement in reversed(before):
        if isinstance(statement, ast.Assert) or (isinstance(statement, ast.Expr) and not _acts(statement)):
            continue
        if _stored(statement) & needed or (isinstance(statement, ast.Expr) and _names(statement) & needed):
            kept.insert(0, statement)
            needed |= _names(statement)
    return kept, shown, needed - {name for statement in kept for name in _stored(statement)}


def _acts(statement: ast.Expr) -> bool:
    name = _call_name(statement.value)
    return bool(name) and name not in _WRAPPERS and not name.startswith("assert")


def _names(node: ast.AST) -> set[str]:
    own = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)} - own


def _stored(node: ast.AST) -> set[str]:
    names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def _module_level(tree: ast.Module, needed: set[str], support: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Imports and definitions of the test file that give the names; (None, []) where one of them cannot be shown."""
    imports: list[str] = []
    helpers: list[str] = []
    wanted, done = sorted(needed), set[str]()
    while wanted:
        name = wanted.pop(0)
        if name in done or hasattr(builtins, name):
            continue
        done.add(name)
        node = next((item for item in tree.body if name in _stored(item)), None)
        match node:
            case ast.Import(names=aliases):
                alias = next(item for item in aliases if (item.asname or item.name).split(".")[0] == name)
                if alias.name.split(".")[0] in support:
                    return None, []
                imports.append(ast.unparse(ast.Import([alias])))
            case ast.ImportFrom(module=module, level=0, names=aliases) if (
                module and module.split(".")[0] not in support
            ):
                alias = next(item for item in aliases if (item.asname or item.name) == name)
                imports.append(ast.unparse(ast.ImportFrom(module, [alias], 0)))
            case ast.Assign() | ast.FunctionDef() | ast.ClassDef():
                text = ast.unparse(node)
                if text.count("\n") >= _MAX_HELPER_LINES or getattr(node, "decorator_list", []):
                    return None, []
                helpers.insert(0, text)
                wanted += sorted(_names(node))
            case _:
                return None, []
    return _merged(imports), helpers


def _merged(imports: Sequence[str]) -> list[str]:
    """One line a module."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for line in imports:
        head, _, name = line.partition(" import ")
        if name:
            names.setdefault(head, set()).add(name)
        else:
            plain.add(line)
    return sorted(plain) + [f"{head} import {', '.join(sorted(items))}" for head, items in sorted(names.items())]


def replay_script(case: Case) -> str:
    """A program that runs a case and prints what came out, as one JSON line."""
    return _REPLAY.replace("SETUP", repr("\n".join(case.setup))).replace("EXPRESSION", repr(case.expression))


_REPLAY = """import json
scope = {"__name__": "example"}
value, text, error = "", None, ""
try:
    exec(SETUP, scope)
    result = eval(EXPRESSION, scope)
    value, text = repr(result), result if type(result) is str else None
except Exception as problem:
    error = f"{type(problem).__name__}: {problem}"
print("\\n" + json.dumps({"value": value, "error": error, "text": text}))
"""


def read_replay(output: str | None) -> Outcome | None:
    """What `replay_script` printed; None where it printed nothing of use (an address, a flood, no end)."""
    if not output:
        return None
    try:
        record = json.loads(output.splitlines()[-1])
    except (json.JSONDecodeError, IndexError):
        return None
    outcome = Outcome(record["value"], record["error"].strip(), record["text"])
    words = outcome.value + outcome.error
    too_much = len(words) > _MAX_VALUE or any(mark in words for mark in (" at 0x", "/tmp/", "/home/", "\x1b"))
    return None if too_much or (not words) else outcome


def documentation_of(case: Case, files: Mapping[str, str]) -> str:
    """First paragraph of the docstring of the function that the case calls; "" where that is not clear."""
    name = subject_of(case).rpartition(".")[2]
    found = [text for content in files.values() for text in _docstrings(content).get(name, ())]
    paragraph = " ".join(found[0].split("\n\n")[0].split()) if len(found) == 1 else ""
    return paragraph if 15 <= len(paragraph) <= 250 and not paragraph.startswith((">>>", ":", "..")) else ""


@functools.lru_cache(maxsize=1024)
def _docstrings(content: str) -> Mapping[str, tuple[str, ...]]:
    """Name of a function or class of a file -> docstrings under that name."""
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            found[node.name] = (*found.get(node.name, ()), ast.get_docstring(node) or "")
    return found


@functools.lru_cache(maxsize=64)
def _parsed(module: str) -> ast.Module:
    """The tree of a test file, which nobody changes."""
    return ast.parse(module)


def subject_of(case: Case) -> str:
    """Dotted name of what the case calls, without the name of a variable; "" if it calls nothing by name."""
    variables = {name for text in case.setup for node in ast.parse(text).body for name in _assigned(node)}
    for text in (case.expression, *reversed(case.setup)):
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
                continue
            name = ast.unparse(call.func)
            root, last = name.partition(".")[0], name.rpartition(".")[2]
            if last in _WRAPPERS or (name == root and name in variables):
                continue
            return name if name.replace(".", "").isidentifier() and root not in variables else last
    return ""


def _assigned(node: ast.stmt) -> set[str]:
    return _stored(node) if isinstance(node, ast.Assign) else set()


def write_issue(sight: Sight, rng: random.Random) -> str:
    """An issue in one of several styles."""
    names = [name for name in STYLES if name != "documented" or sight.documentation]
    return STYLES[rng.choice(names)](sight, rng).strip() + "\n"


def _title(sight: Sight, rng: random.Random) -> str:
    name = subject_of(sight.case)
    subject = f"`{name}`" if name else sight.project
    kind = _error_kind(sight.actual)
    if kind:
        return rng.choice([f"{subject} raises {kind}", f"{kind} from {subject}", f"{subject} fails with {kind}"])
    if sight.expected.error:
        wanted = _error_kind(sight.expected)
        return rng.choice([f"{subject} does not raise {wanted}", f"No {wanted} from {subject} for bad input"])
    return rng.choice(
        [f"{subject} gives a wrong result", f"Wrong result of {subject}", f"Unexpected output of {subject}"]
    )


def _error_kind(outcome: Outcome) -> str:
    return outcome.error.partition(":")[0] if outcome.error else ""


def _fence(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


def _show(outcome: Outcome) -> str:
    """An outcome as a block: an error, a text with several lines as it is, or a value."""
    if outcome.error:
        return _fence(outcome.error)
    if outcome.text is not None and "\n" in outcome.text.strip() and "```" not in outcome.text:
        return _fence(outcome.text.rstrip("\n")) if _visible(outcome.text) else _fence(outcome.value)
    return _fence(outcome.value)


def _visible(text: str) -> bool:
    """Whether a text shows all that matters: no tabs, no blanks at line ends."""
    return "\t" not in text and all(line == line.rstrip() for line in text.splitlines()) and not text.endswith("\n")


def _blocks(sight: Sight) -> tuple[str, str]:
    """Expected and actual as blocks of the same kind."""
    if _show_raw(sight.expected) and _show_raw(sight.actual):
        return _show(sight.expected), _show(sight.actual)
    plain = [Outcome(item.value, item.error) for item in (sight.expected, sight.actual)]
    return _show(plain[0]), _show(plain[1])


def _show_raw(outcome: Outcome) -> bool:
    return bool(outcome.error) or (outcome.text is not None and _visible(outcome.text))


def _words(outcome: Outcome) -> str:
    if outcome.error:
        return f"an error, `{' '.join(outcome.error.split())}`"
    return f"`{outcome.value}`"


def _inline(sight: Sight) -> bool:
    return all(
        len(item.value + item.error) <= 70 and "`" not in item.value + item.error
        for item in (sight.expected, sight.actual)
    )


def _others(rng: random.Random) -> str:
    return rng.choice(
        [
            "This is the smallest case I could find; other inputs are affected as well.",
            "It is not the only input that goes wrong, but the easiest one to show.",
            "I suspect that there are more cases like this one.",
            "Please make sure that related inputs are right, too.",
            "",
        ]
    )


def _report(sight: Sight, rng: random.Random) -> str:
    expected, actual = _blocks(sight)
    parts = [
        f"# {_title(sight, rng)}",
        "## Steps to reproduce",
        _fence(sight.case.code, "python"),
        "## Expected",
        expected,
        "## Actual",
        actual,
        _others(rng),
    ]
    return "\n\n".join(part for part in parts if part)


def _session(sight: Sight, rng: random.Random) -> str:
    lines = []
    for statement in [*sight.case.setup, sight.case.expression]:
        first, *rest = statement.split("\n")
        lines += [f">>> {first}", *(f"... {line}" for line in rest), *(["..."] if rest else [])]
    if sight.actual.error:
        lines += ["Traceback (most recent call last):", "  ...", sight.actual.error]
    elif sight.actual.value != "None":
        lines.append(sight.actual.value)
    wanted = (
        f"I expected {_words(sight.expected)}." if _inline(sight) else f"I expected\n\n{_show_plain(sight.expected)}"
    )
    return "\n\n".join([_title(sight, rng), _fence("\n".join(lines), "pycon"), wanted, _others(rng)])


def _show_plain(outcome: Outcome) -> str:
    return _fence(outcome.error or outcome.value)


def _short(sight: Sight, rng: random.Random) -> str:
    if not _inline(sight):
        return _report(sight, rng)
    code = _fence(sight.case.code, "python")
    start = rng.choice(["With the current sources", "On the main branch", f"In {sight.project} {sight.version}"])
    result = f"gives {_words(sight.actual)} instead of {_words(sight.expected)}. {_others(rng)}"
    return f"{_title(sight, rng)}\n\n{start}, this\n\n{code}\n\n{result}"


def _regression(sight: Sight, rng: random.Random) -> str:
    expected, actual = _blocks(sight)
    start = rng.choice(
        [
            "This used to work, and after the last update it does not any more.",
            f"Our build broke when we moved to the latest {sight.project}.",
            f"I think that a recent change in {sight.project} broke something.",
        ]
    )
    return "\n\n".join(
        [
            f"# Regression: {_title(sight, rng)}",
            f"{start} To see it, run:",
            _fence(sight.case.code, "python"),
            "Before:",
            expected,
            "Now:",
            actual,
            _others(rng),
        ]
    )


def _question(sight: Sight, rng: random.Random) -> str:
    expected, actual = _blocks(sight)
    start = rng.choice(
        ["Is this intended?", "Am I misreading the API, or is this a bug?", "I do not understand this result."]
    )
    return "\n\n".join(
        [
            _title(sight, rng),
            start,
            _fence(sight.case.code, "python"),
            "I get",
            actual,
            "but I would have expected",
            expected,
            _others(rng),
        ]
    )


def _review(sight: Sight, rng: random.Random) -> str:
    expected, actual = _blocks(sight)
    intro = rng.choice(
        [
            f"While using {sight.project} {sight.version} in a small script I came across the following.",
            f"A colleague stumbled over this with {sight.project}; I could reduce it to a few lines.",
            "Found while cleaning up some old code of ours:",
        ]
    )
    return "\n\n".join(
        [
            f"**{_title(sight, rng)}**",
            intro,
            _fence(sight.case.code, "python"),
            f"Result:\n{actual}",
            f"Correct would be:\n{expected}",
            _others(rng),
        ]
    )


def _documented(sight: Sight, rng: random.Random) -> str:
    expected, actual = _blocks(sight)
    return "\n\n".join(
        [
            f"# {_title(sight, rng)}",
            f"The documentation says:\n\n> {sight.documentation}",
            "That is not what happens here:",
            _fence(sight.case.code, "python"),
            actual,
            "It should be",
            expected,
            _others(rng),
        ]
    )


STYLES: Mapping[str, Callable[[Sight, random.Random], str]] = {
    "report": _report,
    "session": _session,
    "short": _short,
    "regression": _regression,
    "question": _question,
    "review": _review,
    "documented": _documented,
}
