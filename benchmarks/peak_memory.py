"""The peak of a process's own memory: anonymous pages, which the kernel cannot take back as it can those of files."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Self

_EVERY_S = 0.002


def anonymous_mib() -> float:
    """Anonymous pages of this process that are in memory (`RssAnon` of proc(5)), in MiB."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "the kernel is older than 4.5"
    return int(found[1]) / 1024


class PeakMemory:
    """The most `anonymous_mib` within the block, looked at every 2 ms by a thread; `mib` is it less that at the start.

    `ru_maxrss` would count files, such as the pages of libraries, that come and go as the machine needs its memory.
    """

    def __init__(self) -> None:
        self._before = self._most = 0.0
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    @property
    def mib(self) -> float:
        return self._most - self._before

    def __enter__(self) -> Self:
        self._before = self._most = anonymous_mib()
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._most = max(self._most, anonymous_mib())
