"""Checkpoints of a sharded learner: each process writes its shards (torch's DCP), and any number of them reads them.

The directory is that of `deepswe.training.checkpoint`, with `shards/` in place of `learner.pt`: sealed by a manifest,
renamed when whole, so that a kill at any moment leaves the one before it. All processes must see its file system.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from deepswe.errors import TrainingError, boundary
from deepswe.training.checkpoint import Checkpoint, begin, finish
from deepswe.training.checkpoint_export import export_model
from deepswe.training.learner import Learner
from deepswe.training.sharded import Shards

SHARDS = "shards"


def save_sharded(
    directory: Path,
    step: int,
    *,
    learner: Learner,
    shards: Shards,
    state: Mapping[str, Any],
    keep: int,
    tokenizer: Any = None,
) -> Checkpoint:
    """Write a checkpoint together; every process calls it with the same arguments.

    Args: as of `save_checkpoint`; process 0 writes the state and the export in the Hugging Face format.

    Raises:
        TrainingError: on every process, where one could not write; the checkpoints before it are untouched.
    """
    with boundary("training.checkpoint", TrainingError):
        temporary = shards.agreed(begin(directory, step) if shards.rank == 0 else None)
        save(learner.state_dict(), checkpoint_id=temporary / SHARDS, process_group=shards.mesh.get_group())
        export_model(learner.model, tokenizer, Checkpoint(temporary, step).export, writes=shards.rank == 0)
        made = finish(directory, step, state=state, keep=keep) if shards.rank == 0 else None
        return shards.agreed(made)


def load_sharded(checkpoint: Checkpoint, *, learner: Learner, shards: Shards) -> None:
    """Take up a checkpoint that any number of processes wrote; every process calls it.

    Raises:
        TrainingError: it cannot be read, or is of another model.
    """
    path = checkpoint.path / SHARDS
    if not path.is_dir():
        raise TrainingError(
            f"{checkpoint.path} was written by a learner in one process; resume it with one, or start from its export "
            f"with model.path={checkpoint.export}"
        )
    with boundary(f"training.checkpoint: {path} cannot be read", TrainingError):
        state = learner.state_dict()
        load(state, checkpoint_id=path, process_group=shards.mesh.get_group())
        learner.load_state_dict(state)
