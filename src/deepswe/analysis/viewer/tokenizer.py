"""Token ids of a run as text, for readers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepswe.analysis.record import RunRecord
from deepswe.analysis.viewer.data import Decode
from deepswe.errors import RunError, boundary
from deepswe.optional import optional_module
from deepswe.policy.scripted import ByteRenderer
from deepswe.rollout.store import TrajectoryStore

_SCRIPTED = ("reference_", "noop_")
"""Phases whose tokens are bytes: the solver and the empty policy of `deepswe rollout`."""


def decoder_of(run: RunRecord, path: Path | None) -> Decode | None:
    """What turns a run's token ids into text; None where nothing is known that does.

    Args:
        path: a tokenizer.json, or a directory that holds one; None takes that of the run's newest checkpoint, or of
            the directory `model.path`, or bytes where all attempts are scripted.

    Raises:
        RunError: the file is no tokenizer.
    """
    if path is not None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.exists():
            raise RunError(f"{file} does not exist; give a tokenizer.json, or a directory that holds one")
        return _load(file)
    found = sorted(run.directory.glob("checkpoints/*/step-*/model/tokenizer.json"), key=lambda file: file.parts[-3])
    named = Path(str(run.recipe.get("model", {}).get("path") or "-")) / "tokenizer.json"
    if found or named.is_file():
        return _load(found[-1] if found else named)
    phases = {phase for phase, _ in TrajectoryStore(run.directory).segments()}
    if phases and all(phase.startswith(_SCRIPTED) for phase in phases):
        return ByteRenderer().decode
    return None


def _load(file: Path) -> Decode:
    tokenizers = optional_module("tokenizers", "train", "show tokens as text")
    try:
        with boundary("analysis.tokenizer", RunError):
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except RunError as error:
        raise RunError(
            f"{file} is no tokenizer ({error.__cause__}); give a tokenizer.json, or a directory that holds one"
        ) from error

    def decode(tokens: Sequence[int]) -> str:
        with boundary("analysis.tokenizer", RunError):
            text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    return decode
