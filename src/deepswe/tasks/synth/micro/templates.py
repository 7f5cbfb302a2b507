"""Generated modules without their own names and numbers: thousands of tasks have few of these, and each is read once.

A template has a stand-in, `_0`, `_1`, ..., for each name and number that a module draws, in the order in which they
come. Modules with one template do the same and have their lines in the same places.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from deepswe.tasks.synth.micro.naming import WORDS

_OWN = re.compile(rf"\b(?=[\da-{max(WORDS)[0]}])(?:\d+|(?:{'|'.join(WORDS)})(?:_\w+)?)\b")
_KEPT = 1 << 13


@dataclass(frozen=True, slots=True)
class Outline:
    """A function at the top level of a module.

    Attributes:
        name: its name.
        first: index of the line of its signature, from 0.
        body: index of the first line below its docstring.
        end: index of the line after its last.
        names: its parameters and the variables that it sets, in the order of the text.
    """

    name: str
    first: int
    body: int
    end: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A generated module, right or with a bug.

    Attributes:
        lines: its text.
        template: the same with stand-ins.
        stand_ins: of each of its names and numbers.
    """

    lines: tuple[str, ...]
    template: tuple[str, ...]
    stand_ins: Mapping[str, str]

    @classmethod
    def read(cls, source: str) -> Module:
        """From its text."""
        stand_ins: dict[str, str] = {}
        template = _with_stand_ins(source, stand_ins)
        return cls(tuple(source.split("\n")), tuple(template.split("\n")), stand_ins)

    def with_line(self, index: int, text: str) -> Module:
        """The module with another line in the place of one."""
        stand_ins = dict(self.stand_ins)
        changed = _with_stand_ins(text, stand_ins)
        lines = (*self.lines[:index], text, *self.lines[index + 1 :])
        return Module(lines, (*self.template[:index], changed, *self.template[index + 1 :]), stand_ins)

    @property
    def source(self) -> str:
        """Its text."""
        return "\n".join(self.lines)

    def load(self, function: str) -> Callable[..., object]:
        """One of its functions. The module is run for it: its text is ours, so it runs in process."""
        namespace: dict[str, Any] = {alias: int(own) for own, alias in self.stand_ins.items() if own.isdigit()}
        exec(_compiled("\n".join(self.template)), namespace)
        loaded: Callable[..., object] = namespace[self.stand_ins.get(function, function)]
        return loaded

    def outlines(self) -> tuple[Outline, ...]:
        """Its functions."""
        own = {alias: name for name, alias in self.stand_ins.items()}
        return tuple(
            Outline(
                own.get(of.name, of.name), of.first, of.body, of.end, tuple(own.get(name, name) for name in of.names)
            )
            for of in _outlined("\n".join(self.template))
        )


def _with_stand_ins(text: str, stand_ins: dict[str, str]) -> str:
    """The text as a part of a template; `stand_ins` gets those of names and numbers that it had not."""
    return _OWN.sub(lambda match: stand_ins.setdefault(match[0], f"_{len(stand_ins)}"), text)


@lru_cache(maxsize=_KEPT)
def _compiled(template: str) -> CodeType:
    return compile(template, "<micro>", "exec")


@lru_cache(maxsize=_KEPT)
def _outlined(template: str) -> tuple[Outline, ...]:
    return tuple(_outline(node) for node in ast.parse(template).body if isinstance(node, ast.FunctionDef))


def _outline(node: ast.FunctionDef) -> Outline:
    parameters = [argument.arg for argument in node.args.args]
    stored = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    body = node.body[1].lineno - 1  # body[0] is the docstring
    names = tuple(dict.fromkeys([*parameters, *stored]))
    return Outline(node.name, node.lineno - 1, body, node.end_lineno or body, names)
