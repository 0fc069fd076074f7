from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# A process of its own: what it tells the allocator lasts until it ends.
PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from trainyard.parallel.mesh import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(100 * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

n_ranks = int(sys.argv[1])
assert not n_ranks or keep_freed_memory(n_ranks)
page_faults()
print(page_faults(), Path("/proc/self/statm").read_text().split()[1])
"""


def measure(n_ranks: int) -> list[int]:
    """Gives the page faults of twenty more times 100 MiB, and the resident pages then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(n_ranks)], capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_by_one_rank_and_returned_by_several() -> None:
    # Without it every page is faulted in again, of 4 KiB, or of 2 MiB where the kernel likes; with
    # it all but what the gaps in the heap still cost.
    (without, _), (of_one, kept), (of_several, returned) = (measure(n) for n in (0, 1, 4))
    assert without >= 20 * 50
    assert of_one <= without / 4
    assert of_several >= 20 * 50
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    assert (kept - returned) * page_bytes > 90 * 2**20
