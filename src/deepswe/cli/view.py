"""`deepswe view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or going on.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Write one file that opens from disk, and start no server.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the server; 0 takes a free one.")] = 0,
    gold: Annotated[
        str,
        typer.Option(
            "--gold",
            help="Where gold patches come from: auto, recipe (makes tasks anew), none, or a task set's path.",
        ),
    ] = "auto",
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A tokenizer.json; otherwise the newest checkpoint's.")
    ] = None,
    tokens: Annotated[bool, typer.Option(help="Keep the token streams; without them the file is smaller.")] = True,
    ratios: Annotated[
        bool, typer.Option("--ratios", help="Compute each sampled token's ratio with the newest checkpoint.")
    ] = False,
) -> None:
    """Show every attempt of a run in the browser, from a server on this machine or as one file."""
    from deepswe.analysis.record import read_run
    from deepswe.analysis.viewer.page import open_book, write_viewer
    from deepswe.analysis.viewer.serve import ViewerServer
    from deepswe.cli.places import free_place

    if out is not None:
        free_place("--out", out, run, suffix=".html")
    record = read_run(run)
    computed = None
    if ratios:
        from deepswe.analysis.viewer.ratios import ratios_of

        computed = ratios_of(record)
    if out is not None:
        print(write_viewer(run, out, gold=gold, tokenizer=tokenizer, tokens=tokens, ratios=computed))
        return
    book = open_book(record, gold=gold, tokenizer=tokenizer, tokens=tokens, ratios=computed)
    with ViewerServer(record, book, port=port) as server:
        print(f"{server.address}\nCtrl-C ends the server.", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("ended")
