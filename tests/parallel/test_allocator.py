from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# A process of its own: what it tells the allocator lasts until it ends.
PROGRAM = """
import resource, sys
import torch
from trainyard.parallel.mesh import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(100 * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if "keep" in sys.argv:
    assert keep_freed_memory()
page_faults()
print(page_faults())
"""


def faults_of_twenty_more_times_100_mib(argument: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    # Without it every page is faulted in again, of 4 KiB, or of 2 MiB where the kernel likes; with
    # it all but what the gaps in the heap still cost.
    without = faults_of_twenty_more_times_100_mib("leave")
    assert without >= 20 * 50
    assert faults_of_twenty_more_times_100_mib("keep") <= without / 4
