"""`deepswe serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as engine.vllm.python=/opt/vllm/bin/python.")
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="How many servers.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each server; 0 leaves the choice to vLLM.")] = 0,
    port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Port of the first server; the others get the next ones.")
    ] = 8000,
    host: Annotated[str, typer.Option(help="Address that they listen on.")] = "127.0.0.1",
) -> None:
    """Start vLLM servers for the recipe's model, print the setting that names them, and keep them until Ctrl-C.

    vLLM lives in an environment of its own: engine.vllm.python is its interpreter. The servers obey whoever reaches
    them, weights included: let them listen on a private network only.
    """
    from deepswe.config import load_recipe

    wanted = load_recipe(recipe, overrides or ())

    from deepswe.cli.progress import TerminalProgress
    from deepswe.session.serve import serve_recipe

    with TerminalProgress() as progress:
        serve_recipe(
            wanted, servers=servers, gpus=gpus, host=host, port=port, progress=progress,
            on_ready=lambda setting: print(setting, flush=True),
        )  # fmt: skip
