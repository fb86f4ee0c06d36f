"""Memory that is freed and wanted again."""

import subprocess
import sys

import pytest

from raypfl.engine import heap

FAULTS = """
import resource, sys
import torch
from raypfl.engine.heap import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
row = torch.zeros(10 * 2**20)
for _ in range(20):
    row + 1.0
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
def test_a_temporary_comes_from_the_memory_of_the_last_one():
    """Twenty of 40 MiB are 205,000 pages if each is asked of the system anew."""

    def faults(what: str) -> int:
        run = subprocess.run([sys.executable, "-c", FAULTS, what], capture_output=True, text=True, check=True)
        return int(run.stdout)

    pages, left = 20 * 40 * 2**20 // 4096, faults("leave")
    if left < pages:
        pytest.skip("the system gives larger pages")
    assert faults("keep") < left - pages // 2


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_other_c_libraries_are_left_alone(monkeypatch, error):
    def missing(name):
        raise error

    monkeypatch.setattr(heap.ctypes, "CDLL", missing)
    heap.keep_freed_memory()
