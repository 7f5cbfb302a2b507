"""What is told to glibc's allocator, in processes of its own: it cannot be taken back."""

import ctypes
import subprocess
import sys

import pytest

from deepswe.allocator import keep_freed_memory

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")

FAULTS = """
import resource, sys
import numpy as np
from deepswe.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory({})
def step():
    tensors = [np.ones(1 << 18) for _ in range(8)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Pages that the kernel had to map while one and the same 16 MiB were asked for and freed 20 times."""
    return int(subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True).stdout)


def test_memory_that_is_freed_is_there_for_what_comes_next():
    assert faults("kept") < 200 < faults("given back") / 10


def test_own_wishes_stay():
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "0"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
