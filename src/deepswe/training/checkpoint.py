"""Checkpoints: whole directories that appear by a rename, so that a half-written one is never picked up.

<directory>/step-00000010/
    learner.pt      what `Learner.state_dict()` gave
    state.json      the caller's own state
    model/          the model and tokenizer as `save_pretrained` writes them, for use elsewhere
    manifest.json   the step, and the size and SHA-256 of every other file; written last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepswe.errors import TrainingError, boundary
from deepswe.policy.checkpoints import EXPORT, MANIFEST, complete_steps, hashes_of, newest_whole
from deepswe.training.checkpoint_export import export_model

_LEARNER, _STATE = "learner.pt", "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: its directory.
        step: as given to `save_checkpoint`.
    """

    path: Path
    step: int

    @property
    def export(self) -> Path:
        """The directory that `from_pretrained` loads; there if the checkpoint was saved with a model."""
        return self.path / EXPORT

    def state(self) -> dict[str, Any]:
        """The caller's own state."""
        with _reading(self.path):
            state: dict[str, Any] = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
        return state

    def learner_state(self) -> dict[str, Any]:
        """For `Learner.load_state_dict`; tensors on the CPU."""
        with _reading(self.path):
            state: dict[str, Any] = torch.load(self.path / _LEARNER, map_location="cpu", weights_only=True)
        return state


def save_checkpoint(
    directory: Path,
    step: int,
    *,
    learner_state: Mapping[str, Any],
    state: Mapping[str, Any],
    keep: int,
    model: Any = None,
    tokenizer: Any = None,
) -> Checkpoint:
    """Write a checkpoint, then remove all but the `keep` newest.

    All is written to a temporary directory, flushed to the disk and renamed. One of the same step is replaced.

    Args:
        directory: holds the checkpoints of one run; only its owner may call this.
        step: orders them.
        learner_state: tensors and plain values, as `torch.load(weights_only=True)` reads them.
        state: JSON values.
        keep: at least 1.
        model, tokenizer: exported as `from_pretrained` takes them, unless None.

    Raises:
        TrainingError: it could not be written (a full disk, say); the checkpoints before it are untouched.
    """
    final, temporary = _places(directory, step)
    try:
        with boundary("training.checkpoint", TrainingError):
            begin(directory, step)
            with (temporary / _LEARNER).open("wb") as file:
                torch.save(dict(learner_state), file)
            if model is not None:
                export_model(model, tokenizer, temporary / EXPORT)
            return finish(directory, step, state=state, keep=keep)
    except TrainingError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = latest(directory)
        raise TrainingError(
            f"checkpoint {final} was not written ({_first_cause(error)}); "
            + (f"{kept.path} is intact: " if kept else "")
            + "make room or fix the directory, then resume"
        ) from error


def begin(directory: Path, step: int) -> Path:
    """A temporary directory for the checkpoint of a step; what killed processes left is removed."""
    _sweep(directory)
    temporary = _places(directory, step)[1]
    temporary.mkdir(parents=True)
    return temporary


def finish(directory: Path, step: int, *, state: Mapping[str, Any], keep: int) -> Checkpoint:
    """Seal what stands in the temporary directory, publish it, and remove all but the `keep` newest."""
    final, temporary = _places(directory, step)
    (temporary / _STATE).write_text(json.dumps(dict(state), indent=2) + "\n", encoding="utf-8")
    _seal(temporary, step)
    _publish(temporary, final)
    for old in all_checkpoints(directory)[:-keep]:
        shutil.rmtree(old.path, ignore_errors=True)
    return Checkpoint(final, step)


def _places(directory: Path, step: int) -> tuple[Path, Path]:
    """Where the checkpoint of a step comes to stand, and where it is written first."""
    final = directory / f"step-{step:08d}"
    return final, directory / f".{final.name}.tmp"


def latest(directory: Path) -> Checkpoint | None:
    """The checkpoint of the highest step that is as it was written, or None; a damaged one is named in a warning."""
    found = newest_whole(directory)
    return None if found is None else Checkpoint(found[1], found[0])


def to_resume(directory: Path) -> Checkpoint | None:
    """As `latest`; None only where no checkpoint was ever written, so that a run never begins anew over its records.

    Raises:
        TrainingError: there are some, and each is damaged.
    """
    found = latest(directory)
    if found is None and (written := sorted(directory.glob("step-*"))):
        raise TrainingError(
            f"none of the {len(written)} checkpoints in {directory} is as it was written, so nothing can be resumed "
            "from; restore one, or move the run's directory away to begin anew"
        )
    return found


def all_checkpoints(directory: Path) -> list[Checkpoint]:
    """The complete checkpoints in the order of their steps; incomplete ones and other files are passed over."""
    return [Checkpoint(path, step) for step, path in complete_steps(directory)]


def _seal(path: Path, step: int) -> None:
    """Flush every file, and write the manifest last."""
    files = sorted(_files(path))
    for file in files:
        _flush(file)
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in files}
    manifest = {"step": step, "sizes": sizes, "sha256": hashes_of(path, sizes)}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _flush(path / MANIFEST)
    for folder in {file.parent for file in files} | {path}:
        _flush(folder)


def _publish(temporary: Path, final: Path) -> None:
    """Rename into place; an older one of the same step moves out first and then goes."""
    replaced = final.with_name(f".{final.name}.old.tmp")
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(path: Path) -> Iterator[Path]:
    return (file for file in path.rglob("*") if file.is_file())


def _first_cause(error: BaseException) -> str:
    """The root of a chain of causes and contexts: "No space left on device" rather than what torch made of it."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _reading(path: Path) -> Any:
    return boundary(f"training.checkpoint: {path} cannot be read; remove it to use an older one", TrainingError)
