"""Where the checkpoints of a run lie, and which of them are whole and as they were written. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepswe.errors import ConfigError
from deepswe.regular import open_regular, read_regular
from deepswe.shapes import misfit_in_record

_log = logging.getLogger(__name__)

MANIFEST, EXPORT = "manifest.json", "model"
PLACES = ("start", "training")
"""Directories of a run's checkpoints whose models are for use elsewhere; the start of RL is step 0."""
HASHING = 8
"""Files that are hashed at once."""
_NAME = re.compile(r"step-(\d{8,})")


def complete_steps(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints, in the order of their steps; anything else is passed over."""
    return [(step, path) for step, path in _steps(directory) if is_complete(path)]


def newest_whole(*directories: Path, part: str = "") -> tuple[int, Path] | None:
    """(step, path) of the highest step that is as it was sealed; a newer one that is not is named in a warning.

    Args:
        directories: with checkpoints; of equal steps the last directory's counts.
        part: as of `damage`.
    """
    found = [step for directory in reversed(directories) for step in _steps(directory)]
    for step, path in sorted(found, key=lambda one: one[0], reverse=True):
        if not (wrong := damage(path, part)):
            return step, path
        _log.warning(f"checkpoint {path} is damaged and passed over: {wrong}")
    return None


def is_complete(path: Path) -> bool:
    """Whether the manifest is there and every file that it lists has its size."""
    return not _sized(path)[0]


def damage(path: Path, part: str = "") -> str:
    """What of a checkpoint is not as it was sealed; "" where all is. Reads its files, one piece after the other.

    Args:
        path: of the checkpoint.
        part: name of the directory in it whose bytes are looked at; all by default. Of other files only the sizes are.

    A manifest of an earlier version lists no hashes; then only the sizes are compared.
    """
    wrong, manifest = _sized(path)
    if wrong:
        return wrong
    hashes = {
        name: kept for name, kept in manifest.get("sha256", {}).items() if not part or name.startswith(f"{part}/")
    }
    try:
        found = hashes_of(path, hashes)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return next((f"{name} has other bytes than were written" for name in hashes if found[name] != hashes[name]), "")


def hashes_of(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Name of a file below `path` -> SHA-256 of its bytes, in hexadecimal; several files at once.

    Raises:
        OSError: one cannot be read.
    """

    def of(name: str) -> tuple[str, str]:
        with open_regular(path / name) as file:
            return name, hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(HASHING) as threads:
        return dict(threads.map(of, names))


def _steps(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    return sorted((int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))


def _sized(path: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with the manifest or the sizes, and the manifest."""
    try:
        manifest = json.loads(read_regular(path / MANIFEST))
        wrong = misfit_in_record(manifest, {"sizes": Mapping[str, int]}, MANIFEST)
        if not wrong and "sha256" in manifest:
            wrong = misfit_in_record(manifest, {"sha256": Mapping[str, str]}, MANIFEST)
        sizes = {} if wrong else manifest["sizes"]
        other = next((name for name, size in sizes.items() if (path / name).stat().st_size != size), "")
    except (OSError, ValueError, RecursionError) as error:
        return f"its files cannot be looked at: {error}", {}
    return wrong or (f"{other} is not as long as it was" if other else ""), manifest


def is_run(spec: str) -> bool:
    """Whether RUN or RUN@STEP names a directory with checkpoints; one that is a model itself is none."""
    directory = Path(spec.partition("@")[0])
    return bool(spec) and (directory / "checkpoints").is_dir() and not (directory / "config.json").exists()


def exported_model(spec: str) -> Path:
    """The directory of a run's model, which `from_pretrained` loads.

    Args:
        spec: RUN for the newest checkpoint, or RUN@STEP; step 0 is the start of RL.

    Raises:
        ConfigError: there is no such checkpoint, it holds no model, or it is damaged.
    """
    name, _, step = spec.partition("@")
    if step and not step.isdigit():
        raise ConfigError(f"{spec}: {step!r} is no step; write RUN@STEP, such as runs/quickstart@100")
    places = [Path(name) / "checkpoints" / place for place in PLACES]
    chosen = _of_step(name, int(step), places) if step else newest_whole(*places, part=EXPORT)
    if chosen is None:
        raise ConfigError(f"{name} has no checkpoint; there are: none")
    export = chosen[1] / EXPORT
    if not export.is_dir():
        raise ConfigError(f"{chosen[1]} holds no model; name another checkpoint")
    return export


def _of_step(name: str, step: int, places: Sequence[Path]) -> tuple[int, Path]:
    steps = dict(found for place in places for found in complete_steps(place))
    if step not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{name} has no checkpoint of step {step}; there are: {there}")
    if wrong := damage(steps[step], EXPORT):
        raise ConfigError(f"{steps[step]} is damaged: {wrong}; name another checkpoint")
    return step, steps[step]
