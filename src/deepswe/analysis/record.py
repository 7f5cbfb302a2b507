"""A run directory as data for readers: recipe, versions, metrics and summary. Works while the run is going on."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepswe.config import Recipe
from deepswe.errors import RunError, StoreError
from deepswe.regular import read_regular
from deepswe.shapes import misfit
from deepswe.training.metrics import read_rows

Row = Mapping[str, Any]
"""One line of metrics.jsonl: "kind", "step", "time_s" and whatever that kind measures."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run wrote, apart from its trajectories.

    Attributes:
        directory: the run directory.
        recipe: the resolved recipe as a tree; empty where it is not written yet.
        environment: versions and machine; empty where they are not written yet.
        rows: lines of metrics.jsonl in order.
        summary: the verdict of a finished run; empty while it is going on.
    """

    directory: Path
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]
    summary: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The run's name as its recipe gives it, or else its directory's."""
        return str(self.recipe.get("run", {}).get("name") or self.directory.resolve().name)

    def of_kind(self, kind: str) -> tuple[Row, ...]:
        """The rows of one kind, in the order of their steps."""
        return tuple(sorted((row for row in self.rows if row["kind"] == kind), key=lambda row: int(row["step"])))


def read_run(directory: Path) -> RunRecord:
    """Read what is there of a run.

    Raises:
        RunError: the directory does not exist, or a file in it is damaged. A torn last line of metrics.jsonl, of a run
            that was killed or is writing, is left out.
    """
    if not directory.is_dir():
        raise RunError(f"{directory} is no directory; give the directory of a run, such as runs/quickstart")
    return RunRecord(
        directory,
        recipe=_read_recipe(directory / "recipe.json") or _read_recipe(directory / "recipe.toml"),
        environment=_read_tree(directory / "environment.json"),
        rows=_read_rows(directory / "metrics.jsonl"),
        summary=_read_tree(directory / "summary.json"),
    )


def number(row: Row, key: str) -> float | None:
    """A finite number under `key`, or None where it is missing, null, not finite or no number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def total(rows: Iterable[Row], key: str) -> float | None:
    """Sum over the rows that have a number under `key`; None where none has."""
    values = [value for row in rows if (value := number(row, key)) is not None]
    return sum(values) if values else None


def _read_rows(path: Path) -> tuple[Row, ...]:
    try:
        return tuple(read_rows(path))
    except StoreError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


def _read_recipe(path: Path) -> Mapping[str, Any]:
    tree = _read_tree(path)
    sections = {name: tree[name] for name in Recipe.model_fields if name in tree and name != "version"}
    if wrong := misfit(sections, Mapping[str, Mapping[str, Any]], path.name):
        raise RunError(f"{path} is no recipe: {wrong}; restore it, or remove it to do without")
    return tree


def _read_tree(path: Path) -> Mapping[str, Any]:
    data = _read_bytes(path)
    if not data:
        return {}
    try:
        text = data.decode("utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}; restore it, or remove it to do without") from error
    if not isinstance(tree, dict):
        raise RunError(f"{path} holds a {type(tree).__name__} instead of keys and values")
    return tree


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
