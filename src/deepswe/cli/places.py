"""Where a command may write: never in the place of what it reads, and a picture only where a picture is expected."""

from __future__ import annotations

from pathlib import Path

from deepswe.errors import ConfigError

RECORDS = frozenset(
    {
        "environment.json",
        "evaluations.json",
        "ledger.jsonl",
        "lock",
        "metrics.jsonl",
        "recipe.json",
        "requests.jsonl",
        "summary.json",
    }
)
"""Files of a run that are its record."""


def free_place(option: str, out: Path, *read: Path | str, suffix: str = "") -> None:
    """Check a place before any work.

    Args:
        option: that names it, for the message.
        out: what is written there.
        read: files and run directories that the command reads; RUN:PHASE and NAME=... too.
        suffix: that it has to have, such as ".png".

    Raises:
        ConfigError: it would replace what is read, or a run's record, or has another suffix.
    """
    if suffix and out.suffix.lower() != suffix:
        raise ConfigError(f"{option} {out} does not end in {suffix}; give the name of a {suffix[1:].upper()} file")
    if out.is_dir() and suffix:
        raise ConfigError(f"{option} {out} is a directory; give the name of a file in it")
    for source in map(_path, read):
        whole = out.resolve()
        if out.exists() and source.exists() and out.samefile(source):
            raise ConfigError(f"{option} {out} is what is read; give another name, so that nothing is lost")
        inside = source.is_dir() and source.resolve() in whole.parents
        if inside and (whole.name in RECORDS or (source / "trajectories").resolve() in whole.parents):
            raise ConfigError(f"{option} {out} is among the records of {source}; give another name")


def _path(spec: Path | str) -> Path:
    """Of RUN, RUN:PHASE, FILE, or NAME=... of these."""
    text = str(spec)
    if isinstance(spec, str) and "=" in text.partition("/")[0]:
        text = text.partition("=")[2]
    if isinstance(spec, str) and ":" in text and not Path(text).exists():
        text = text.rpartition(":")[0]
    return Path(text)
