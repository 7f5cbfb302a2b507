"""Files that are replaced whole: a reader, and a process that is killed, see the old bytes or the new ones."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all, its directory included; what was there stays until the new bytes are on disk.

    Args:
        path: of the file.
        data: bytes, or text to be encoded as UTF-8.

    Raises:
        OSError: it cannot be written; names `path`, and nothing is left beside it.
    """
    raw = data.encode("utf-8") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # where it could not be made it cannot be taken away
            temporary.unlink()
