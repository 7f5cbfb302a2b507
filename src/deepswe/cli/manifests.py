"""`deepswe sandbox manifests`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def manifests(
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, such as sandbox.image=NAME.")] = None,
    tasks: Annotated[list[Path] | None, typer.Option(help="A task set whose images are pulled; repeatable.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="An image to pull; repeatable.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images of one DaemonSet.")] = 40,
    warm_pool: Annotated[int, typer.Option(help="Also a warm pool of agent-sandbox of so many sandboxes.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory to write to.")] = Path(),
) -> None:
    """Write manifests for Kubernetes that depend on tasks: images brought to nodes ahead, and a warm pool."""
    from deepswe.config import load_sandbox
    from deepswe.errors import ConfigError
    from deepswe.sandbox.kubernetes import manifests as made
    from deepswe.sandbox.pool import limits_of
    from deepswe.tasks.taskset import load_task_set

    config = load_sandbox([*(overrides or ()), "sandbox.backend=kubernetes"])
    images = [*(image or ())]
    for path in tasks or ():
        images += made.images_of(load_task_set(path))
    files = {}
    if images:
        files["prepull.yaml"] = made.prepull(list(dict.fromkeys(images)), config.kubernetes, batch)
    if warm_pool:
        if not config.kubernetes.warm_pool:
            raise ConfigError("a warm pool needs a name: give sandbox.kubernetes.warm_pool=NAME")
        files["warm-pool.yaml"] = made.warm_pool(config, limits_of(config), warm_pool)
    if not files:
        raise ConfigError("there is nothing to write: give --image, --tasks (with images), or --warm-pool")
    out.mkdir(parents=True, exist_ok=True)
    for name, objects in files.items():
        (out / name).write_text(made.to_yaml(objects), encoding="utf-8")
        print(f"{out / name}: {len(objects)} objects")
