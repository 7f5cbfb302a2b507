"""`deepswe sandbox`."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deepswe.cli.manifests import manifests

if TYPE_CHECKING:
    from deepswe.sandbox.census import Census

app = typer.Typer(help="Where code runs.", no_args_is_help=True)
Name = Literal["bubblewrap", "docker", "podman", "kubernetes"]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings, such as sandbox.memory_mib=512.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


@app.command()
def check(
    overrides: Overrides = None,
    backend: Annotated[Name, typer.Option(help="Which backend.")] = "bubblewrap",
    only: Annotated[list[str] | None, typer.Option(help="A check or a group of checks; can be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the checks that take long.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the conformance suite on a backend; the exit code is 0 only where no check failed."""
    from deepswe.cli.progress import TerminalProgress
    from deepswe.config import load_sandbox
    from deepswe.sandbox.conformance import check_backend

    config = load_sandbox([*(overrides or ()), f"sandbox.backend={backend}"])
    with TerminalProgress() as progress:
        verdicts = check_backend(config, progress, names=only or (), quick=quick)
    failed = [verdict for verdict in verdicts if verdict.outcome == "failed"]
    refused = [verdict for verdict in verdicts if verdict.outcome == "refused"]
    passed = len(verdicts) - len(failed) - len(refused)
    if as_json:
        row = {
            "backend": backend,
            "passed": passed,
            "failed": len(failed),
            "refused": [f"{verdict.check}: {verdict.reason}" for verdict in refused],
            "failures": [f"{verdict.check}: {verdict.reason}" for verdict in failed],
        }
        print(json.dumps(row))
    else:
        print(f"{backend}: {passed} passed, {len(failed)} failed, {len(refused)} refused")
    sys.exit(1 if failed else 0)


@app.command("ls")
def list_all(
    overrides: Overrides = None,
    backend: Annotated[Name | None, typer.Option(help="Only this backend; all that answer without it.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the sandboxes of every run on this machine, engine or cluster."""
    import asyncio

    from deepswe.config import load_sandbox
    from deepswe.sandbox.census import list_sandboxes

    census = asyncio.run(list_sandboxes(load_sandbox(overrides or ()), backend))
    now = time.time()
    if as_json:
        print(json.dumps({"sandboxes": census.rows(), "silent": dict(census.silent)}))
        return
    for record in census.records:
        age, left = now - record.created, record.expires - now
        words = (record.backend, record.name, record.state, f"age {age:.0f} s", f"expires in {left:.0f} s", record.task)
        print("  ".join(filter(None, words)))
    _tell_silent(census)
    print(f"{len(census.records)} sandboxes")


@app.command()
def reap(
    overrides: Overrides = None,
    backend: Annotated[Name | None, typer.Option(help="Only this backend; all that answer without it.")] = None,
    as_json: AsJson = False,
) -> None:
    """End the sandboxes that are expired or whose owners are dead, and remove what those left."""
    import asyncio

    from deepswe.config import load_sandbox
    from deepswe.sandbox.census import reap as reap_all

    census = asyncio.run(reap_all(load_sandbox(overrides or ()), backend))
    if as_json:
        print(json.dumps({"reaped": census.rows(), "silent": dict(census.silent)}))
        return
    for record in census.records:
        print(f"{record.backend}  {record.name}  {record.state}")
    _tell_silent(census)
    print(f"{len(census.records)} removed")


def _tell_silent(census: Census) -> None:
    """One line for the backends that are not here, and one for each that failed."""
    for name, reason in census.silent.items():
        if name not in census.absent:
            print(f"deepswe: {name} did not finish: {reason}", file=sys.stderr)
    if census.absent:
        print(f"not reachable: {', '.join(census.absent)} (why: --backend NAME)", file=sys.stderr)


@app.command()
def bench(
    samples: Annotated[int, typer.Option(min=1, help="Sandboxes started one after another.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Measure bubblewrap on this machine, against bare bwrap and `docker run`; exit code 1 if a target is missed."""
    from dataclasses import asdict

    from deepswe.cli.progress import TerminalProgress
    from deepswe.sandbox.bench import measure

    with TerminalProgress() as progress:
        figures = measure(progress, samples=samples)
    missed = figures.missed()
    if as_json:
        print(json.dumps({**asdict(figures), "missed": missed}))
    else:
        for name, value in asdict(figures).items():
            print(f"{name:20} {value}")
        for words in missed:
            print(f"missed: {words}")
    sys.exit(1 if missed else 0)


app.command()(manifests)
