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
blocks, size = int(sys.argv[2]), int(sys.argv[3])
def step():
    tensors = [np.ones(size >> 3) for _ in range(blocks)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, blocks: int, size: int) -> int:
    """Pages that the kernel had to map while the same blocks of memory were asked for and freed 20 times."""
    command = [sys.executable, "-c", FAULTS, how, str(blocks), str(size)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(("blocks", "size"), [(8, 2 << 20), (3, 12 << 20)], ids=["small", "large"])
def test_memory_that_is_freed_is_there_for_what_comes_next(blocks, size):
    assert faults("kept", blocks, size) < 200 < faults("given back", blocks, size) / 10


def test_own_wishes_stay():
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "0"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
