"""The command: `deepswe ...`. A failure that we know is one line on stderr and exit code 1; Ctrl-C is 130.

Each command imports what it needs when it is called, and `deepswe --help` nothing at all.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

from deepswe import __version__
from deepswe.cli.commands import COMMANDS, top_help
from deepswe.errors import DeepsweError

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


def run(words: Sequence[str]) -> None:
    """Carry out one command line, without the name of the program.

    Raises:
        SystemExit: it is over; the code is 2 where the command line is wrong.
        DeepsweError, OSError: the command failed.
    """
    first = words[0] if words else ""
    if "_DEEPSWE_COMPLETE" in os.environ:  # a shell asks for completions, of any command
        first = "complete"
    elif first in ("", "--help"):
        print(top_help(), file=sys.stdout if first else sys.stderr)
        sys.exit(0 if first else 2)
    elif first == "--version":
        print(f"deepswe {__version__}")
        sys.exit(0)
    from deepswe.cli.app import build_app

    build_app(first if first in COMMANDS else None)(list(words))


def main() -> None:
    """Entry point of the console script. SIGTERM is taken as Ctrl-C, so that whatever is open is closed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an odd locale, or a path of odd bytes, is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        run(sys.argv[1:])
    except DeepsweError as error:
        _fail(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{place}{error.strerror or error}; give a path that can be read or written, with space left")
    except RecursionError:
        _fail("the input is nested too deeply to be read; give a file that is not")
    except KeyboardInterrupt:
        sys.exit(_interrupted(sys.argv[1:]))
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # the parser has made this of an interrupt, and says nothing
            _interrupted(sys.argv[1:])
        raise


def _interrupted(words: Sequence[str]) -> int:
    way = ", continue with --resume" if _has_resume(words) else ""
    print(f"deepswe: interrupted; nothing recorded is lost{way}", file=sys.stderr)
    return INTERRUPTED


def _has_resume(words: Sequence[str]) -> bool:
    """Whether the command of a command line has the option --resume."""
    if not words or words[0] not in COMMANDS:
        return False
    from deepswe.cli.app import options_of

    return "--resume" in options_of(words)


def _fail(message: str) -> None:
    """End with exit code 1 and one line, whatever lines the message has."""
    from deepswe.cli.lines import warn

    warn(f"deepswe: {message}")
    sys.exit(1)
