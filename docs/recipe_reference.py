"""Write docs/recipe.md, the reference of every key of a recipe, from the docstrings and types in deepswe.config.

Run `python docs/recipe_reference.py` after a change of deepswe.config; a test says when it was forgotten.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deepswe.config import MOST, Recipe, Section

PAGE = Path(__file__).with_name("recipe.md")
INTRODUCTION = """# Recipe reference

Generated from `deepswe.config` by `docs/recipe_reference.py`. A recipe is a TOML file. A key that is not listed here is
refused, and so is a value outside its range; no count is above 10^12, and a seed has 64 bits. On the command line
`section.key=value` changes one setting, such as `training.steps=50`. Where it changes `tasks.kind`, what the file says
of the tasks is left out as far as the new kind has no such key. Two keys have no default: `run.name` and `tasks.kind`.
"""


def reference() -> str:
    """The page as Markdown."""
    return INTRODUCTION + "".join(_section("", Recipe))


def _section(path: str, section: type[Section]) -> Iterator[str]:
    if path:
        yield f"\n## `[{path}]`\n"
    if section.__doc__:
        yield f"\n{_inline(section.__doc__)}\n"
    inside = [_sections_of(field) for field in section.model_fields.values()]
    kinds = {kind for choices in inside for kind in choices}
    if path and len(kinds) == 1 and all(inside):
        yield from _matrix(section, kinds.pop())
        return
    plain = {name: field for name, field in section.model_fields.items() if not _sections_of(field)}
    if plain:
        yield "\n| key | type | default | meaning |\n|---|---|---|---|\n"
        for name, field in plain.items():
            meaning = _meaning(path, name, field)
            yield f"| `{name}` | {_type_of(field)} | {_default_of(field)} | {meaning} |\n"
    for name, field in section.model_fields.items():
        inner = _sections_of(field)
        for choice in inner:
            title = f"{path}.{name}" if path else name
            if len(inner) > 1:
                title += f' with kind = "{choice.model_fields["kind"].default}"'
            elif field.description:
                yield f"\n`{name}`: {_inline(field.description)}\n"
            yield from _section(title, choice)


def _matrix(section: type[Section], kind: type[Section]) -> Iterator[str]:
    """One table for a section whose fields all hold the same kind of section."""
    keys = list(kind.model_fields)
    yield f"\n{_inline(kind.__doc__ or '')}\n\n"
    yield "".join(f"- `{key}`: {_meaning(kind.__name__, key, kind.model_fields[key])}\n" for key in keys)
    yield "\n| key | " + " | ".join(f"default of `{key}`" for key in keys) + " |\n|---" + "|---" * len(keys) + "|\n"
    for name, field in section.model_fields.items():
        values = (json.dumps(getattr(field.default, key)) for key in keys)
        yield f"| `{name}` | " + " | ".join(f"`{value}`" for value in values) + " |\n"


def _meaning(path: str, name: str, field: FieldInfo) -> str:
    """What a key means.

    Raises:
        ValueError: nothing says it.
    """
    if not (field.description or "").strip():
        raise ValueError(f"{path}.{name} has no meaning: write a docstring under it in deepswe.config")
    return _inline(field.description or "")


def _sections_of(field: FieldInfo) -> list[type[Section]]:
    """The sections that a field may hold; none for a plain value."""
    choices = get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
    return [choice for choice in choices if isinstance(choice, type) and issubclass(choice, Section)]


def _type_of(field: FieldInfo) -> str:
    return ", ".join([_type_name(field.annotation), *_bounds(field.metadata)])


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    """As text; those that the introduction names for all are left out."""
    for item in metadata:
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
            bound = getattr(item, name, None)
            if bound is not None and abs(bound) < MOST:
                yield f"{sign} {bound:,}" if isinstance(bound, int) else f"{sign} {bound:g}"


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        kind, field = get_args(annotation)
        return ", ".join([_type_name(kind), *_bounds(field.metadata)])
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        return f"list of {_type_name(inner[0])}" + ("" if inner[-1] is Ellipsis else f", {len(inner)} long")
    names = {int: "integer", float: "number", str: "text", bool: "boolean", Path: "path"}
    return names.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default.value if isinstance(field.default, Enum) else field.default
    return f"`{json.dumps(str(value) if isinstance(value, Path) else value)}`"


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
