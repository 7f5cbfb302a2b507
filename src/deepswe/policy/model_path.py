"""What `model.path` names, and whether it can be had: a run or a directory here, or a model of the hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, constants

from deepswe.config import ModelConfig
from deepswe.errors import ConfigError, boundary
from deepswe.policy.checkpoints import exported_model, is_run

HUB_S = 10.0
"""How long the hub may take to say whether it has a model; it is asked once."""
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


def with_model_directory(model: ModelConfig) -> ModelConfig:
    """The same model by the directory, or the name of the hub, that it is loaded from.

    Raises:
        ConfigError: see `model_directory`.
    """
    return model.model_copy(update={"path": model_directory(model.path)})


def model_directory(path: str) -> str:
    """What `model.path` stands for: of a run, RUN or RUN@STEP, the exported model of a checkpoint; else itself.

    Raises:
        ConfigError: it is a run without such a checkpoint, or see `check_model`.
    """
    if is_run(path):
        return str(exported_model(path))
    check_model(path)
    return path


def check_model(path: str) -> None:
    """Refuse a model that is neither here, nor in the hub's cache, nor on the hub as it can be reached now.

    Raises:
        ConfigError: see `check_model_path`; or the hub does not have it, or does not answer.
    """
    check_model_path(path)
    if not path or Path(path).is_dir() or _is_cached(path):
        return
    try:
        with boundary("policy.hub", ConfigError):
            HfApi().model_info(path, timeout=HUB_S)
    except ConfigError as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path {path!r} is no directory here and not in the hub's cache, and the hub does not give it "
            f"({first}); correct the name, give a directory that save_pretrained wrote, or make the hub reachable"
        ) from error


def check_model_path(path: str) -> None:
    """Refuse a path that can only be a directory here, and is none. Empty, or a hub's owner/name, passes.

    Raises:
        ConfigError: it is a plain name, has another form than a hub's, or lies in a folder that is here.
    """
    if not path or Path(path).is_dir():
        return
    if Path(path).exists():
        raise ConfigError(f"model.path {path!r} is a file; give the directory that holds it")
    if not _HUB.fullmatch(path):
        raise ConfigError(
            f"model.path {path!r} is no directory here, and no name of the hub, which has the form owner/name; give "
            "the directory of a model, a run or RUN@STEP, or such a name"
        )
    folder = path.partition("/")[0]
    if Path(folder).is_dir():
        raise ConfigError(
            f"model.path {path!r} is not in the folder {folder}, which is here; correct the path, or where the model "
            f"of that name on the hub is meant, start in another directory"
        )


def _is_cached(name: str) -> bool:
    """Whether the hub's cache holds any file of a model, in the layout that its documentation gives."""
    snapshots = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return any(snapshots.glob("*/*"))
