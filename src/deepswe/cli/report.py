"""`deepswe report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="A run directory, finished or going on.")]) -> None:
    """Write the run's report (one offline HTML file) and its curves anew; prints the path of the report."""
    from deepswe.session.outputs import write_outputs

    print(write_outputs(run))
