"""Memory that the process keeps for its next tensors instead of giving it back.

An update makes and frees tensors of many megabytes thousands of times. By default glibc asks the system for each of
them and returns it at once, and the system fills every page with zeros before it is used again: a tenth of the time of
an update of a small model. What is kept is what was in use at once, and gaps.
"""

from __future__ import annotations

import ctypes

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_ALL = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory, in one arena for all threads; returns whether it can (glibc alone can).

    For a process that computes on the CPU until it ends. Calling it again changes nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _ALL)])
