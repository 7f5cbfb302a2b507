"""Whether `model.path` can be had: a directory here, or a model of the hub. Told at once, before work begins."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, constants

from deepswe.errors import ConfigError, boundary

HUB_S = 10.0
"""How long the hub may take to say whether it has a model; it is asked once."""
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


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
    """Refuse a path that can only be a directory here, and holds no model. Empty, or a hub's owner/name, passes.

    Raises:
        ConfigError: it is a plain name, has another form than a hub's, lies in a folder that is here, or is a run.
    """
    if not path:
        return
    if Path(path).is_dir():
        _refuse_run(Path(path))
        return
    if Path(path).exists():
        raise ConfigError(f"model.path {path!r} is a file; give the directory that holds it")
    if not _HUB.fullmatch(path):
        raise ConfigError(
            f"model.path {path!r} is no directory here, and no name of the hub, which has the form owner/name; give "
            "the directory of a model, or such a name"
        )
    folder = path.partition("/")[0]
    if Path(folder).is_dir():
        raise ConfigError(
            f"model.path {path!r} is not in the folder {folder}, which is here; correct the path, or where the model "
            f"of that name on the hub is meant, start in another directory"
        )


def _refuse_run(directory: Path) -> None:
    """A run directory is easily named for its model."""
    checkpoints = directory / "checkpoints"
    if not checkpoints.is_dir() or (directory / "config.json").exists():
        return
    exported = sorted(checkpoints.glob("training/step-*/model"))
    advice = f"model.path={exported[-1]} is that of its newest checkpoint" if exported else "no checkpoint has one yet"
    raise ConfigError(f"model.path '{directory}' is the directory of a run, not of a model; {advice}")


def _is_cached(name: str) -> bool:
    """Whether the hub's cache holds any file of a model, in the layout that its documentation gives."""
    snapshots = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return any(snapshots.glob("*/*"))
