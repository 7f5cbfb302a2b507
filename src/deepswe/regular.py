"""Files of others, opened only where they are regular: a pipe without a writer would hold its reader up for ever."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened, or is a pipe, a socket, a device or a directory; names `path`.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = os.fstat(file).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(file, "rb")
    os.close(file)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    """All bytes of a file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()
