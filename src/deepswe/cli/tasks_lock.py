"""`deepswe tasks lock` and `deepswe tasks restore`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def lock(
    target: Annotated[str, typer.Argument(help="A task-set file, or `bundled`.")],
    out: Annotated[Path | None, typer.Option(help="Where the lock goes; by default SET.lock.json.")] = None,
) -> None:
    """Write down what another machine needs to build the same layers, with the hash of each."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.evaluation.validation import load_target
    from deepswe.tasks.layers import LayerCache
    from deepswe.tasks.lock import make_lock, write_lock

    path = out or Path(f"{target}.lock.json")
    with TerminalProgress() as progress:
        made = make_lock(load_target(target, progress=progress), LayerCache.default(), progress)
    write_lock(made, path)
    counts = {"environments": len(made.environments), "archives": len(made.archives), "trees": len(made.trees)}
    print(json.dumps({**counts, "out": str(path)}))


def restore(
    path: Annotated[Path, typer.Argument(metavar="LOCK", help="A lock.")],
    repository: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of a project or git repository that is not where the lock says."),
    ] = None,
) -> None:
    """Build the layers of a lock that are missing here, and check all of them; prints those that were built as JSON."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.errors import ConfigError
    from deepswe.tasks.layers import LayerCache
    from deepswe.tasks.lock import read_lock
    from deepswe.tasks.lock import restore as restore_layers

    wrong = [text for text in repository or () if "=" not in text]
    if wrong:
        raise ConfigError(f"--repository {wrong[0]!r} is not of the form NAME=PATH")
    places = dict(text.split("=", 1) for text in repository or ())
    with TerminalProgress() as progress:
        built = restore_layers(read_lock(path), LayerCache.default(), progress, repositories=places)
    print(json.dumps({"built": built}))
