"""The command: `deepswe ...`. A failure that we know is one line on stderr and exit code 1; Ctrl-C is 130."""

from __future__ import annotations

import io
import signal
import sys
from typing import NoReturn

import typer

from deepswe import __version__
from deepswe.cli import (
    analyse,
    audit,
    compare,
    evaluate,
    export,
    leaderboard,
    plan,
    rank,
    report,
    reproduce,
    rollout,
    sandbox,
    serve,
    simulate,
    sweep,
    tasks,
    tests,
    train,
    verifier,
    view,
    watch,
)
from deepswe.cli.lines import warn
from deepswe.errors import DeepsweError

app = typer.Typer(
    name="deepswe",
    help="Train software-engineering agents by reinforcement learning on executable repositories.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train.train)
app.command()(plan.plan)
app.command()(rollout.rollout)
app.command("eval")(evaluate.evaluate)
app.command()(evaluate.replay)
app.command()(sweep.sweep)
app.command()(compare.compare)
app.command()(export.export)
app.command()(leaderboard.leaderboard)
app.command()(report.report)
app.command()(view.view)
app.command()(analyse.analyse)
app.command()(watch.watch)
app.command()(reproduce.reproduce)
app.command()(rank.rank)
app.command()(rank.curves)
app.command()(audit.audit)
app.command()(simulate.simulate)
app.command()(serve.serve)
app.add_typer(tasks.app, name="tasks")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(verifier.app, name="verifier")
app.add_typer(tests.app, name="tests")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"deepswe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def _fail(message: str) -> NoReturn:
    """End with exit code 1 and one line, whatever lines the message has."""
    warn(f"deepswe: {message}")
    sys.exit(1)


def main() -> None:
    """Entry point of the console script. SIGTERM is taken as Ctrl-C, so that whatever is open is closed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an odd locale, or a path of odd bytes, is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except DeepsweError as error:
        _fail(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{place}{error.strerror or error}; give a path that can be read or written, with space left")
    except RecursionError:
        _fail("the input is nested too deeply to be read; give a file that is not")
    except KeyboardInterrupt:
        print("deepswe: interrupted; nothing recorded is lost, continue with --resume", file=sys.stderr)
        sys.exit(130)
