"""A file as operators see it: its concrete syntax tree, and where in the text each node stands.

The tree is libcst's, which keeps every byte; a node's span is its text without the blanks and brackets around it. So an
operator looks at nodes and answers with edits of byte ranges, and the layout of the rest stays as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from deepswe.errors import TaskError

_LAYOUT = (
    cst.BaseParenthesizableWhitespace,
    cst.TrailingWhitespace,
    cst.EmptyLine,
    cst.Comment,
    cst.Newline,
    cst.LeftParen,
    cst.RightParen,
    cst.Annotation,
    cst.Decorator,
    cst.FormattedString,
    cst.Assert,
)
"""What no operator is shown."""

_FIELDS: dict[type[cst.CSTNode], tuple[str, ...]] = {}


@dataclass(frozen=True, slots=True)
class Edit:
    """A proposal: replace the bytes `start`..`end` by `replacement`."""

    start: int
    end: int
    replacement: str


Edits = tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a file.

    Attributes:
        node: its definition.
        name: dotted, such as "Table.insert".
        nodes: what may be mutated in its body, in the order of the text; nested definitions, annotations, decorators,
            assertions, docstrings and f-strings are left out.
        names: its parameters and local names, in order, without self and cls.
    """

    node: cst.FunctionDef
    name: str
    nodes: tuple[cst.CSTNode, ...]
    names: tuple[str, ...]

    @property
    def short_name(self) -> str:
        """The last part of its name."""
        return self.node.name.value

    @property
    def is_method(self) -> bool:
        """Whether its first parameter is the instance or the class."""
        parameters = (*self.node.params.posonly_params, *self.node.params.params)
        return bool(parameters) and parameters[0].name.value in ("self", "cls")


class Source:
    """A parsed file with byte positions."""

    def __init__(self, file: str, text: str) -> None:
        """Parse it.

        Args:
            file: its path, for messages and sites.
            text: its content.

        Raises:
            TaskError: it is no Python.
        """
        self.file = file
        self.raw = text.encode()
        try:
            module = cst.parse_module(text)
        except cst.ParserSyntaxError as error:
            raise TaskError(f"{file} cannot be mutated: {error}") from error
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self._spans = wrapper.resolve(ByteSpanPositionProvider)
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.functions = tuple(_functions(module, ""))

    def start(self, node: cst.CSTNode) -> int:
        """Byte offset of a node's first byte."""
        return int(self._spans[node].start)

    def end(self, node: cst.CSTNode) -> int:
        """Byte offset after a node's last byte."""
        span = self._spans[node]
        return int(span.start + span.length)

    def text(self, node: cst.CSTNode) -> str:
        """A node as written, without brackets around it."""
        return self.raw[self.start(node) : self.end(node)].decode()

    def bracketed(self, node: cst.CSTNode) -> str:
        """A node as written, in brackets where the file has it in brackets."""
        text = self.text(node)
        return f"({text})" if getattr(node, "lpar", ()) else text

    def line(self, offset: int) -> int:
        """The line of a byte, from 1."""
        return bisect_right(self._starts, offset)

    def lines(self, node: cst.CSTNode) -> tuple[int, int]:
        """First and last line of a node."""
        return self.line(self.start(node)), self.line(max(self.start(node), self.end(node) - 1))

    def holder(self, edit: Edit) -> Function:
        """The innermost function that holds an edit."""
        holders = [item for item in self.functions if self.start(item.node) <= edit.start <= self.end(item.node)]
        return max(holders, key=lambda item: self.start(item.node))

    def replace(self, node: cst.CSTNode, replacement: str) -> Edit:
        """An edit of a whole node."""
        return Edit(self.start(node), self.end(node), replacement)

    def without(self, statement: cst.CSTNode, alone: bool) -> Edit:
        """A statement's lines removed, or replaced by `pass` where it is alone in its block."""
        start, end = self.start(statement), self.end(statement)
        if alone:
            return Edit(start, end, "pass")
        line_start = self.raw.rfind(b"\n", 0, start) + 1
        line_end = self.raw.find(b"\n", end)
        rest = self.raw[end:line_end].strip()
        if self.raw[line_start:start].strip() or line_end < 0 or (rest and not rest.startswith(b"#")):
            return Edit(start, end, "pass")
        return Edit(line_start, line_end + 1, "")


Operator = Callable[[cst.CSTNode, Source, Function], Iterator[Edits]]
"""Looks at one node of a function and proposes bugs."""

FunctionOperator = Callable[[Source, Function], Iterator[Edits]]
"""Looks at a whole function."""


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and what is below it, in the order of the text; see `Function.nodes` for what is left out."""
    yield node
    for child in children(node):
        if isinstance(child, cst.FunctionDef | cst.ClassDef) or _is_docstring(child):
            continue
        yield from walk(child)


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Direct children that are code, in the order of the text."""
    kind = type(node)
    names = _FIELDS.get(kind)
    if names is None:
        names = _FIELDS[kind] = tuple(item.name for item in fields(kind) if item.name not in ("lpar", "rpar"))
    for name in names:
        value = getattr(node, name)
        for child in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if isinstance(child, cst.CSTNode) and not isinstance(child, _LAYOUT):
                yield child


def statements_of(block: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The statements of an indented block; none for anything else."""
    return block.body if isinstance(block, cst.IndentedBlock) else ()


def simple(statement: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """The one small statement of a line, or None."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    return None


def call_name(node: cst.CSTNode) -> str:
    """The last part of the name of what a call calls; "" for anything else."""
    if isinstance(node, cst.Call):
        if isinstance(node.func, cst.Name):
            return node.func.value
        if isinstance(node.func, cst.Attribute):
            return node.func.attr.value
    return ""


def positional(call: cst.Call) -> list[cst.Arg]:
    """The positional arguments of a call, up to a starred one."""
    found: list[cst.Arg] = []
    for argument in call.args:
        if argument.star or argument.keyword is not None:
            break
        found.append(argument)
    return found


def is_text(node: cst.CSTNode) -> bool:
    """Whether a node is a literal text or bytes."""
    return isinstance(node, cst.SimpleString | cst.ConcatenatedString | cst.FormattedString)


def _functions(node: cst.CSTNode, prefix: str) -> Iterator[Function]:
    for child in children(node):
        if isinstance(child, cst.FunctionDef):
            nodes = tuple(walk(child.body))
            yield Function(child, prefix + child.name.value, nodes, _names(child, nodes))
            yield from _functions(child.body, f"{prefix}{child.name.value}.")
        elif isinstance(child, cst.ClassDef):
            yield from _functions(child.body, f"{prefix}{child.name.value}.")
        else:
            yield from _functions(child, prefix)


def _names(function: cst.FunctionDef, nodes: Sequence[cst.CSTNode]) -> tuple[str, ...]:
    parameters = function.params
    found = [item.name.value for item in (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params)]
    for node in nodes:
        target = node.target if isinstance(node, cst.AssignTarget | cst.For | cst.NamedExpr | cst.CompFor) else None
        if isinstance(target, cst.Name):
            found.append(target.value)
        elif isinstance(target, cst.Tuple):
            found += [item.value.value for item in target.elements if isinstance(item.value, cst.Name)]
    return tuple(name for name in dict.fromkeys(found) if name not in ("self", "cls", "_"))


def _is_docstring(statement: cst.CSTNode) -> bool:
    inner = simple(statement)
    return isinstance(inner, cst.Expr) and is_text(inner.value)
