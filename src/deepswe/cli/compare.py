"""`deepswe compare`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

SHOWN = 30
"""Tasks of a list that are shown."""


def compare(
    first: Annotated[str, typer.Argument(help="RUN, RUN:PHASE, or a JSON file of results; NAME=... names it.")],
    second: Annotated[str, typer.Argument(help="The same, of the other side.")],
    force: Annotated[bool, typer.Option("--force", help="Also where the budgets are not known to be equal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, all tasks named.")] = False,
) -> None:
    """Set two results side by side: paired difference, exact test, tasks won and lost by the second."""
    from dataclasses import asdict

    from deepswe.evaluation.compare import compare as compare_results
    from deepswe.evaluation.results import load_results

    found = compare_results(load_results(first), load_results(second), force=force)
    if as_json:
        print(json.dumps(asdict(found)))
        return

    from deepswe.cli.evaluate_tables import plain, share, show
    from deepswe.cli.lines import warn

    difference = found.difference
    rows = [
        (found.first, share(found.means[0])),
        (found.second, share(found.means[1])),
        ("difference", f"{100 * difference.mean:+.1f} points"),
        ("  95% interval, paired by task", f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"),
        ("tasks of both", str(difference.tasks)),
        ("  left out, no verdict on one side", str(difference.unpaired)),
        ("solved by both", str(found.both)),
        ("solved by either", str(found.either)),
        ("won, lost by the second", f"{len(found.won)}, {len(found.lost)}"),
        ("p of an exact sign test (McNemar's)", f"{found.p_value:.2g}"),
    ]
    show(plain(f"{found.second} against {found.first}", ("", ""), rows))
    for name, tasks in (("won", found.won), ("lost", found.lost)):
        if tasks:
            more = f" and {len(tasks) - SHOWN} more (--json)" if len(tasks) > SHOWN else ""
            show(f"{name}: {', '.join(tasks[:SHOWN])}{more}")
    if found.unequal:
        said = ", ".join(f"{name} {a} and {b}" for name, (a, b) in found.unequal.items())
        warn(f"deepswe: not under one known budget ({said}): the difference may be the budget's")
