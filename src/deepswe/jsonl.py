"""Append-only files of JSON objects, one a line: what was appended stays, and a torn line is no line.

A torn line is what a killed writer left: it has no newline, and is no JSON. A last line that only lacks its newline is
whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deepswe.errors import StoreError
from deepswe.regular import read_regular

_BLOCK = 1 << 16


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The lines of a file, without their newlines, and the torn one at its end; nothing without a file.

    Raises:
        OSError: it cannot be read.
    """
    try:
        data = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        data = b""
    *lines, rest = data.split(b"\n")
    return ([*lines, rest], b"") if _is_whole(rest) else (lines, rest)


def begin_so(lines: Sequence[bytes], rest: bytes, beginning: bytes) -> bool:
    """Whether what `read_lines` gave is of a record whose lines have this beginning; an empty file is."""
    return lines[0].startswith(beginning) if lines else rest.startswith(beginning[: len(rest)])


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Be the one process that works on a file, whether it exists or not, until the block ends.

    The mark is a locked file beside it, `.NAME.lock`, gone with the end; that of a killed process holds nobody up.

    Raises:
        StoreError: another process, or another block of this one, works on it.
        OSError: the directory cannot be written.
    """
    mark = path.with_name(f".{path.name}.lock")
    mark.parent.mkdir(parents=True, exist_ok=True)
    while True:
        held = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.pread(held, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise StoreError(f"{path} is in use by process {owner}; wait for it, or name another file") from error
            if not os.fstat(held).st_nlink:
                continue  # the one before has taken its mark away meanwhile
            os.ftruncate(held, 0)
            os.pwrite(held, f"{os.getpid()}\n".encode("ascii"), 0)
            try:
                yield
            finally:
                mark.unlink(missing_ok=True)
            return
        finally:
            os.close(held)


def append_line(path: Path, line: bytes, *, durable: bool = False) -> None:
    """Append one line, handed to the kernel before this returns; the file and its directory are made if need be.

    A torn line is taken out first, and a line that cannot be written whole leaves nothing.

    Args:
        path: of a file with one writer at a time.
        line: a JSON object, without a newline.
        durable: on the disk before this returns.

    Raises:
        OSError: it cannot be written; names `path`, and what was written before stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _append(file, line + b"\n")
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _append(file: int, data: bytes) -> None:
    state = os.fstat(file)
    end = _end_of_lines(file, state.st_size)
    if end < state.st_size:
        if _is_whole(os.pread(file, state.st_size - end, end)):
            end, data = state.st_size, b"\n" + data
        else:
            os.ftruncate(file, end)
    written = 0
    try:
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        if stat.S_ISREG(state.st_mode):
            os.ftruncate(file, end)
        raise


def _is_whole(rest: bytes) -> bool:
    """Whether what has no newline is a line all the same."""
    try:
        return isinstance(json.loads(rest), dict)
    except (ValueError, RecursionError):
        return False


def _end_of_lines(file: int, size: int) -> int:
    """Where the last newline is, and one more."""
    while size:
        start = max(0, size - _BLOCK)
        found = os.pread(file, size - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return 0
