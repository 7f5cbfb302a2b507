import subprocess
import sys

import pytest

from deepswe.training.heap import keep_freed_memory

FAULTS = """
import resource, sys
import torch
from deepswe.training.heap import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
def work():
    for size in (1 << 18, 1 << 20, 1 << 22):
        torch.ones(size).add(1.0).mul(2.0)
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="the C library is not glibc")
def test_tensors_are_made_of_pages_that_the_process_has_already():
    assert 10 * faults("kept") < faults("given back")
