"""Values that come out of a file, checked against the annotations of the dataclass that they are to be.

Python takes any value for any field; a record that somebody else wrote or damaged would then fail far from where it was
read. `misfit` says at once which field has what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NUMBERS = frozenset({int, float})


def misfit(value: Any, wanted: Any, name: str = "") -> str:
    """What does not fit, such as "steps[2].observation is a NoneType, not a str"; "" where all does.

    Args:
        value: plain values, dataclasses, tuples and mappings of them.
        wanted: a type annotation of these; an int fits float, a bool only bool.
        name: of the value, for the sentence.
    """
    origin, arguments = _form(wanted)
    if wanted is Any:
        return ""
    if origin in (Union, UnionType):
        found: list[str] = []
        for one in arguments:
            if not (wrong := misfit(value, one, name)):
                return ""
            found.append(wrong)
        return next((wrong for wrong in found if "[" in wrong or "." in wrong), found[0])
    if origin is Literal:
        return "" if value in arguments else f"{name} is {value!r}, not one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        return _misfit_in_tuple(value, arguments[0], name)
    if origin is Mapping:
        return _misfit_in_mapping(value, arguments[0], arguments[1], name)
    if not _is_a(value, wanted):
        return f"{name or 'it'} is a {type(value).__name__}, not a {getattr(wanted, '__name__', wanted)}"
    return _misfit_in_fields(value, wanted, name) if isinstance(wanted, type) and is_dataclass(wanted) else ""


def _misfit_in_fields(value: Any, kind: Any, name: str) -> str:
    for key, (hint, plain) in _hints(kind).items():
        held = getattr(value, key)
        if type(held) not in plain and (found := misfit(held, hint, f"{name}.{key}" if name else key)):
            return found
    return ""


def misfit_in_record(record: Any, wanted: Mapping[str, Any], name: str = "it") -> str:
    """The same of an object of plain values.

    Args:
        record: the object.
        wanted: key -> annotation; "a.b" is the key b of the object under a. Other keys may be there.
        name: of the object.
    """
    for key, hint in wanted.items():
        held: Any = record
        for part in key.split("."):
            if not isinstance(held, Mapping) or part not in held:
                return f"{name} has no {key}"
            held = held[part]
        if wrong := misfit(held, hint, f"{name}.{key}"):
            return wrong
    return ""


def _is_a(value: Any, wanted: Any) -> bool:
    if wanted is None:
        return value is None
    if wanted is float:
        return type(value) in _NUMBERS
    return type(value) is int if wanted is int else isinstance(value, wanted)


def _misfit_in_tuple(value: Any, item: Any, name: str) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return f"{name or 'it'} is a {type(value).__name__}, not a list"
    if set(map(type, value)) <= _plain(item):
        return ""  # token by token would be slow
    return next(filter(None, (misfit(one, item, f"{name}[{number}]") for number, one in enumerate(value))), "")


def _misfit_in_mapping(value: Any, key: Any, item: Any, name: str) -> str:
    if not isinstance(value, Mapping):
        return f"{name or 'it'} is a {type(value).__name__}, not an object"
    if set(map(type, value)) <= _plain(key) and set(map(type, value.values())) <= _plain(item):
        return ""
    keys = (misfit(one, key, f"a key of {name}") for one in value)
    items = (misfit(one, item, f"{name}[{at!r}]") for at, one in value.items())
    return next(filter(None, (*keys, *items)), "")


@cache
def _plain(wanted: Any) -> Set[type]:
    """Types whose values all fit."""
    if wanted is float:
        return _NUMBERS
    return frozenset({wanted}) if isinstance(wanted, type) and not is_dataclass(wanted) else frozenset()


@cache
def _form(wanted: Any) -> tuple[Any, tuple[Any, ...]]:
    """What an annotation is of, and with which arguments."""
    return get_origin(wanted), get_args(wanted)


@cache
def _hints(kind: type) -> Mapping[str, tuple[Any, Set[type]]]:
    """Field -> its annotation, and the types whose values fit it without a closer look."""
    hints = get_type_hints(kind)
    return {item.name: (hints[item.name], _plain(hints[item.name])) for item in fields(kind)}
