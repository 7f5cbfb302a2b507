"""The parsers of the command, made by Typer out of the table of commands."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer

from deepswe import __version__
from deepswe.cli.commands import COMMANDS, DESCRIPTION, OPTIONS


def build_app(only: str | None = None) -> typer.Typer:
    """The parser of every command, or of `only` one: the modules of the others are not imported then."""
    app = typer.Typer(
        name="deepswe",
        help=DESCRIPTION,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for name in COMMANDS if only is None else (only,):
        place, line = COMMANDS[name]
        module, _, attribute = place.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, short_help=line)
        else:
            app.command(name, short_help=line)(found)
    return app


def options_of(words: Sequence[str]) -> set[str]:
    """The options of the command, or of the group of commands, with which a command line begins."""
    command: Any = typer.main.get_command(build_app(words[0]))
    for word in words:
        inner = getattr(command, "commands", {})
        if word not in inner:
            break
        command = inner[word]
    return {option for parameter in command.params for option in parameter.opts}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"deepswe {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help=OPTIONS["--version"]),
) -> None:
    pass
