"""Where the checkpoints of a run lie, and which of them are whole. Needs no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from deepswe.errors import ConfigError

MANIFEST, EXPORT = "manifest.json", "model"
PLACES = ("start", "training")
"""Directories of a run's checkpoints whose models are for use elsewhere; the start of RL is step 0."""
_NAME = re.compile(r"step-(\d{8,})")


def complete_steps(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints, in the order of their steps; anything else is passed over."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [(step, path) for step, path in sorted(found) if is_complete(path)]


def is_complete(path: Path) -> bool:
    """Whether the manifest is there and every file that it lists has its size."""
    try:
        sizes = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["sizes"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def is_run(spec: str) -> bool:
    """Whether RUN or RUN@STEP names a directory with checkpoints."""
    return bool(spec) and (Path(spec.partition("@")[0]) / "checkpoints").is_dir()


def exported_model(spec: str) -> Path:
    """The directory of a run's model, which `from_pretrained` loads.

    Args:
        spec: RUN for the newest checkpoint, or RUN@STEP; step 0 is the start of RL.

    Raises:
        ConfigError: there is no such checkpoint, or it holds no model.
    """
    name, _, step = spec.partition("@")
    if step and not step.isdigit():
        raise ConfigError(f"{spec}: {step!r} is no step; write RUN@STEP, such as runs/quickstart@100")
    steps = dict(found for place in PLACES for found in complete_steps(Path(name) / "checkpoints" / place))
    wanted = int(step) if step else max(steps, default=0)
    if wanted not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{name} has no checkpoint{f' of step {step}' if step else ''}; there are: {there}")
    export = steps[wanted] / EXPORT
    if not export.is_dir():
        raise ConfigError(f"{steps[wanted]} holds no model; name another checkpoint")
    return export
