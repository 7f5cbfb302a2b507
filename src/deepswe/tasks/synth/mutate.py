"""Mutation operators: small, realistic bugs, located on the syntax tree and applied to the text, so that layout stays.

Each operator looks at one node and proposes replacements of byte ranges. What the whole file can suffer is
`mutations(...)`; which of them become tasks is decided elsewhere, by running the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deepswe.errors import TaskError


@dataclass(frozen=True, slots=True)
class Mutation:
    """One edit of one file.

    Attributes:
        file: path relative to the root of the repository.
        kind: name of the operator, a key of `OPERATORS`.
        start, end: byte offsets in the UTF-8 file; what lies between is replaced.
        replacement: the new text.
        line: first line of the edit, from 1.
        last_line: last line of the node that was mutated.
        function: dotted name of the innermost function, such as "Table.insert".
    """

    file: str
    kind: str
    start: int
    end: int
    replacement: str
    line: int = 0
    last_line: int = 0
    function: str = ""

    def apply(self, text: str) -> str:
        """The file with the bug.

        Raises:
            TaskError: the range lies outside the text.
        """
        raw = text.encode()
        if not 0 <= self.start <= self.end <= len(raw):
            raise TaskError(
                f"mutation of {self.file} at bytes {self.start}..{self.end} lies outside its {len(raw)} bytes"
            )
        return (raw[: self.start] + self.replacement.encode() + raw[self.end :]).decode()


@dataclass(frozen=True, slots=True)
class Edit:
    """A proposal: replace the bytes `start`..`end` by `replacement`."""

    start: int
    end: int
    replacement: str


class Source:
    """A text with byte positions for its syntax tree."""

    def __init__(self, text: str, tree: ast.AST) -> None:
        self.raw = text.encode()
        self._only = {id(block[0]) for node in ast.walk(tree) for block in _blocks(node) if len(block) == 1}
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        """Byte offset of the first byte of a node that has a position."""
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined,no-any-return]

    def end(self, node: ast.AST) -> int:
        """Byte offset after the last byte of a node that has a position."""
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined,no-any-return]

    def text(self, node: ast.AST) -> str:
        """The node as written."""
        return self.raw[self.start(node) : self.end(node)].decode()

    def between(self, left: ast.AST, right: ast.AST) -> str:
        """What is written between two nodes."""
        return self.raw[self.end(left) : self.start(right)].decode()

    def alone(self, statement: ast.stmt) -> bool:
        """Whether a statement is the only one of its block."""
        return id(statement) in self._only

    def replace(self, node: ast.AST, replacement: str) -> Edit:
        """An edit of a whole node."""
        return Edit(self.start(node), self.end(node), replacement)


@dataclass(frozen=True, slots=True)
class Scope:
    """What an operator may know about the function around a node: its name and its local names in order."""

    function: str
    names: tuple[str, ...]


Operator = Callable[[ast.AST, Source, Scope], Iterator[Edit]]

_COMPARISONS: Mapping[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<",),
    ast.Gt: (">=", "<"),
    ast.GtE: (">",),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
}
_ARITHMETIC: Mapping[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "//",
    ast.FloorDiv: "/",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
_TWINS: Mapping[str, str] = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "startswith": "endswith",
    "endswith": "startswith",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "strip": "rstrip",
    "upper": "lower",
    "lower": "upper",
    "find": "rfind",
    "rfind": "find",
    "ljust": "rjust",
    "rjust": "ljust",
    "append": "extend",
    "split": "rsplit",
    "rsplit": "split",
    "partition": "rpartition",
    "rpartition": "partition",
    "floor": "ceil",
    "ceil": "floor",
    "keys": "values",
    "values": "keys",
    "isdigit": "isalpha",
    "match": "search",
    "search": "match",
    "issubset": "issuperset",
    "union": "intersection",
    "intersection": "union",
}
_OTHER_ERROR: Mapping[str, str] = {
    "KeyError": "IndexError",
    "IndexError": "KeyError",
    "ValueError": "TypeError",
    "TypeError": "ValueError",
}
_CLEANERS = frozenset({"strip", "lstrip", "rstrip", "lower", "upper", "copy", "splitlines", "title", "casefold"})
_CONVERTERS = frozenset({"list", "tuple", "sorted", "reversed", "set", "str", "int", "float", "abs", "iter", "dict"})


def flip_comparison(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`a < b` becomes `a <= b` or `a > b`; `==` becomes `!=`; and so on."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return
    left, right = node.left, node.comparators[0]
    if _plain(source.between(left, right)):
        for operator in _COMPARISONS[type(node.ops[0])]:
            yield Edit(source.end(left), source.start(right), f" {operator} ")


def swap_arithmetic(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`a + b` becomes `a - b`; and so on. String formatting and joining are left alone."""
    if not isinstance(node, ast.BinOp) or type(node.op) not in _ARITHMETIC:
        return
    if any(_is_text(operand) for operand in (node.left, node.right)):
        return
    if _plain(source.between(node.left, node.right)):
        yield Edit(source.end(node.left), source.start(node.right), f" {_ARITHMETIC[type(node.op)]} ")


def swap_augmented(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`a += b` becomes `a -= b`, or a plain assignment."""
    if not isinstance(node, ast.AugAssign) or _is_text(node.value):
        return
    if _plain(source.between(node.target, node.value)):
        if type(node.op) in (ast.Add, ast.Sub):
            yield Edit(source.end(node.target), source.start(node.value), f" {_ARITHMETIC[type(node.op)]}= ")
        yield Edit(source.end(node.target), source.start(node.value), " = ")


def swap_boolean(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`a and b` becomes `a or b`, and the other way round."""
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        left, right = node.values
        if source.between(left, right).strip() in ("and", "or"):
            word = "or" if isinstance(node.op, ast.And) else "and"
            yield Edit(source.end(left), source.start(right), source.between(left, right).replace(_word(node.op), word))


def drop_term(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`a and b` becomes `a`, or `b`."""
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        for value in node.values:
            text = source.text(value)
            if "\n" not in text and not isinstance(value, ast.BoolOp | ast.Lambda | ast.IfExp | ast.NamedExpr):
                yield source.replace(node, text)


def off_by_one(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """A small integer grows or shrinks by one."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1000:
        if source.text(node) != str(node.value):
            return
        yield source.replace(node, str(node.value + 1))
        if node.value > 0:
            yield source.replace(node, str(node.value - 1))


def flip_flag(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`True` becomes `False`, and the other way round."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield source.replace(node, str(not node.value))


def negate_condition(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`if a:` becomes `if not a:`; a `not` that is there goes."""
    if not isinstance(node, ast.If | ast.While | ast.IfExp) or isinstance(node.test, ast.Constant | ast.Compare):
        return
    test = node.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield source.replace(test, source.text(test.operand))
    elif isinstance(test, ast.Name | ast.Call | ast.Attribute | ast.Subscript):
        yield source.replace(test, f"not {source.text(test)}")
    elif isinstance(test, ast.BoolOp) and "\n" not in source.text(test):
        yield source.replace(test, f"not ({source.text(test)})")


def drop_not(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`not a` becomes `a`, outside of an `if`'s whole condition."""
    if isinstance(node, ast.BoolOp | ast.Call | ast.Return | ast.Assign | ast.keyword):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.Not):
                yield source.replace(child, source.text(child.operand))


def drop_guard(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """An `if` that only returns, raises or skips is forgotten."""
    if not isinstance(node, ast.If) or node.orelse or len(node.body) != 1:
        return
    if isinstance(node.body[0], ast.Return | ast.Raise | ast.Continue | ast.Break):
        yield from _without_line(node, source)


def drop_branch(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """The last `elif` or `else` of an `if` is forgotten."""
    if not isinstance(node, ast.If) or not node.orelse:
        return
    last = node.orelse[-1]
    if len(node.orelse) == 1 and isinstance(last, ast.If) and last.orelse:
        return
    yield Edit(source.end(node.body[-1]), source.end(last), "")


def drop_statement(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """One assignment to an attribute, an item or an existing name, or one call for its effect, is forgotten."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield from _without_line(node, source)


def swap_arguments(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """The first two positional arguments of a call change places."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    first, second = node.args[:2]
    if isinstance(first, ast.Starred) or isinstance(second, ast.Starred) or source.text(first) == source.text(second):
        return
    if all(isinstance(item, ast.Name | ast.Attribute | ast.Constant | ast.Subscript) for item in (first, second)):
        swapped = source.text(second) + source.between(first, second) + source.text(first)
        yield Edit(source.start(first), source.end(second), swapped)


def drop_argument(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """The last keyword argument of a call is forgotten."""
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg is not None:
        before = (*node.args, *node.keywords[:-1])
        if before and max(source.end(item) for item in before) <= source.start(node.keywords[-1]):
            yield Edit(max(source.end(item) for item in before), source.end(node.keywords[-1]), "")


def wrong_variable(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """Another local name is used in a return, an argument, an index or an operand."""
    if not isinstance(node, ast.Return | ast.Call | ast.Subscript | ast.BinOp | ast.Compare):
        return
    for child in _operands(node):
        if isinstance(child, ast.Name) and child.id in scope.names:
            place = scope.names.index(child.id)
            for step in (1, -1):
                other = scope.names[(place + step) % len(scope.names)]
                if other not in (child.id, "self", "cls"):
                    yield source.replace(child, other)


def shift_slice(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """One end of a slice moves by one."""
    if not isinstance(node, ast.Slice):
        return
    for bound in (node.lower, node.upper):
        if isinstance(bound, ast.Name | ast.Attribute | ast.Call):
            yield source.replace(bound, f"{source.text(bound)} + 1")
            yield source.replace(bound, f"{source.text(bound)} - 1")


def shift_range(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """The end of a `range` moves by one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
        bound = node.args[0] if len(node.args) == 1 else node.args[1]
        if not isinstance(bound, ast.Starred | ast.Constant) and "\n" not in source.text(bound):
            yield source.replace(bound, f"{source.text(bound)} - 1")
            yield source.replace(bound, f"{source.text(bound)} + 1")


def swap_jump(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`break` becomes `continue`, and the other way round."""
    if isinstance(node, ast.Break | ast.Continue):
        yield source.replace(node, "continue" if isinstance(node, ast.Break) else "break")


def narrow_except(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """A handler of several exceptions loses the last one; a handler of one catches another one."""
    if not isinstance(node, ast.ExceptHandler) or node.type is None:
        return
    if isinstance(node.type, ast.Tuple) and len(node.type.elts) > 1:
        yield source.replace(node.type, source.text(node.type.elts[0]))
    elif isinstance(node.type, ast.Name):
        yield source.replace(node.type, _OTHER_ERROR.get(node.type.id, "LookupError"))


def swap_call(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """A call of a twin: `min` for `max`, `lstrip` for `rstrip`, `startswith` for `endswith`."""
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in _TWINS:
        yield source.replace(node.func, _TWINS[node.func.id])
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _TWINS:
        end = source.end(node.func)
        yield Edit(end - len(node.func.attr.encode()), end, _TWINS[node.func.attr])


def drop_call(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`x.strip()` or `list(x)` becomes `x`."""
    if not isinstance(node, ast.Call) or node.keywords:
        return
    match node.func, node.args:
        case ast.Attribute(value=value, attr=name), [] if name in _CLEANERS:
            yield source.replace(node, source.text(value))
        case ast.Name(id=name), [ast.Name() | ast.Attribute() as argument] if name in _CONVERTERS:
            yield source.replace(node, source.text(argument))


def swap_ternary(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`a if c else b` becomes `b if c else a`."""
    if isinstance(node, ast.IfExp) and "\n" not in source.text(node):
        body, test, orelse = (source.text(part) for part in (node.body, node.test, node.orelse))
        if body != orelse and not isinstance(node.orelse, ast.IfExp):
            yield source.replace(node, f"{orelse} if {test} else {body}")


def drop_minus(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """`-a` becomes `a`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield source.replace(node, source.text(node.operand))


def wrong_return(node: ast.AST, source: Source, scope: Scope) -> Iterator[Edit]:
    """A returned tuple is reversed; a returned call's value gets lost where its first argument is a name."""
    if not isinstance(node, ast.Return):
        return
    value = node.value
    if isinstance(value, ast.Tuple) and len(value.elts) == 2 and _plain_comma(source.between(*value.elts)):
        first, second = value.elts
        yield Edit(source.start(first), source.end(second), f"{source.text(second)}, {source.text(first)}")
    elif isinstance(value, ast.Call) and len(value.args) == 1 and isinstance(value.args[0], ast.Name):
        yield source.replace(value, value.args[0].id)


OPERATORS: Mapping[str, Operator] = {
    "flip_comparison": flip_comparison,
    "swap_arithmetic": swap_arithmetic,
    "swap_augmented": swap_augmented,
    "swap_boolean": swap_boolean,
    "drop_term": drop_term,
    "off_by_one": off_by_one,
    "flip_flag": flip_flag,
    "negate_condition": negate_condition,
    "drop_not": drop_not,
    "drop_guard": drop_guard,
    "drop_branch": drop_branch,
    "drop_statement": drop_statement,
    "swap_arguments": swap_arguments,
    "drop_argument": drop_argument,
    "wrong_variable": wrong_variable,
    "shift_slice": shift_slice,
    "shift_range": shift_range,
    "swap_jump": swap_jump,
    "narrow_except": narrow_except,
    "swap_call": swap_call,
    "drop_call": drop_call,
    "swap_ternary": swap_ternary,
    "drop_minus": drop_minus,
    "wrong_return": wrong_return,
}


def mutations(file: str, text: str) -> tuple[Mutation, ...]:
    """Every mutation inside the functions of a file, in the order of the operators and of the text.

    Annotations, decorators, assertions and f-strings are left alone. A few of them may not parse or may change
    nothing; `is_sound` tells.

    Raises:
        TaskError: the text is no Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise TaskError(f"{file} cannot be mutated: {error}") from error
    source = Source(text, tree)
    found: dict[tuple[int, int, str], Mutation] = {}
    places = [
        (node, scope)
        for function, name in _functions(tree, "")
        for scope in [_scope(function, name)]
        for node in _nodes(function)
    ]
    for kind, operator in OPERATORS.items():
        for node, scope in places:
            for edit in operator(node, source, scope):
                key = (edit.start, edit.end, edit.replacement)
                if key not in found:
                    found[key] = Mutation(file, kind, *key, *_lines(node), function=scope.function)
    return tuple(found.values())


def is_sound(mutation: Mutation, text: str) -> bool:
    """Whether the mutated file still parses and its syntax tree is another one."""
    try:
        return ast.dump(ast.parse(mutation.apply(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, prefix + child.name
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function that may be mutated: its defaults and its body, nested definitions apart."""
    stack: list[ast.AST] = [*function.args.defaults, *(item for item in function.args.kw_defaults if item is not None)]
    yield from stack
    stack = list(function.body)
    while stack:
        node = stack.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr | ast.Assert):
            continue
        yield node
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.AnnAssign):
            children = iter([node.value] if node.value is not None else [])
        stack[0:0] = list(children)


def _scope(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Scope:
    arguments = function.args
    names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    stored = [node.id for node in _nodes(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return Scope(name, tuple(item for item in dict.fromkeys([*names, *stored]) if item not in ("self", "cls", "_")))


def _operands(node: ast.Return | ast.Call | ast.Subscript | ast.BinOp | ast.Compare) -> Iterator[ast.AST]:
    match node:
        case ast.Return(value=value) if value is not None:
            yield value
        case ast.Call(args=arguments):
            yield from arguments
        case ast.Subscript(slice=index):
            yield index
        case ast.BinOp(left=left, right=right):
            yield left
            yield right
        case ast.Compare(left=left, comparators=comparators):
            yield left
            yield from comparators


def _without_line(node: ast.stmt, source: Source) -> Iterator[Edit]:
    """Remove a statement with its line where it has siblings to keep the block; else leave `pass`."""
    start, end = source.start(node), source.end(node)
    line_start = source.raw.rfind(b"\n", 0, start) + 1
    line_end = source.raw.find(b"\n", end)
    whole_line = not source.raw[line_start:start].strip() and line_end >= 0 and not source.raw[end:line_end].strip()
    if whole_line and not source.alone(node):
        yield Edit(line_start, line_end + 1, "")
    else:
        yield Edit(start, end, "pass")


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _lines(node: ast.AST) -> tuple[int, int]:
    if isinstance(node, ast.expr | ast.stmt | ast.ExceptHandler):
        return node.lineno, node.end_lineno or node.lineno
    children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return min(child.lineno for child in children), max(child.end_lineno or child.lineno for child in children)


def _plain(text: str) -> bool:
    """Whether an operator alone, without a bracket, a comment or a line end, stands between two operands."""
    return not any(mark in text for mark in "()#\n\\")


def _plain_comma(text: str) -> bool:
    return text.strip() == ","


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _word(operator: ast.boolop) -> str:
    return "and" if isinstance(operator, ast.And) else "or"
