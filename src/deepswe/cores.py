"""How many cores this process may use, of those that the machine has.

Two things bound them: the cores that it may run on (its affinity), and the processor time that its control groups allow
(`docker run --cpus=2`, a pod's limit), which leaves all cores visible. Whoever starts as many threads as are visible is
stopped by the second for most of the time.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from deepswe.control_groups import bounding_groups


def usable_cores(proc: Path = Path("/proc/self")) -> int:
    """Cores that this process may use: at least 1; a part of a core counts as one, so that all of it is used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(group, version) for group, version in bounding_groups("cpu", proc))
    return max(1, math.ceil(min(cores, *quotas, math.inf)))


def _quota(group: Path, version: int) -> float:
    """Cores' worth of processor time that one group allows; infinite where it says nothing."""
    try:
        if version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # the root of a hierarchy has no limit; "max" is none
        return math.inf
