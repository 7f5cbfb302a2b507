"""The C library's allocator, told to keep what is freed.

glibc gives the end of its heap back to the kernel when it is free, and a step of training frees and asks for the same
tensors again and again: each time, the kernel has to find, clear and map every page anew. That was a tenth of an update
of a small model. Larger blocks go on being the kernel's from their making to their release: from the size on to which
glibc by itself raises that limit as it goes, so that no block goes to the kernel that would have stayed. The peak of a
process was within a tenth of that without these settings, mostly within a few hundredths.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

KEPT = 256 << 20
"""Free bytes that the end of a heap may have."""
LARGE = 32 << 20
"""Bytes from which a block is the kernel's: as many as glibc takes."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OWN_WISHES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have this process keep freed memory for what it allocates next.

    Args:
        environment: where it says how glibc's allocator is to act, nothing is changed.

    Returns:
        Whether it does; with another C library, or another allocator in its place, all is as before.
    """
    if any(name in environment for name in _OWN_WISHES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, LARGE) and mallopt(_TRIM_THRESHOLD, KEPT))
