"""Keeps freed CPU memory in the process for the next step.

glibc maps each large tensor anew and unmaps it when freed, so the kernel zeroes the same gigabytes
every step. Kept memory is reused instead. The price: glibc's aligned allocations leave gaps, so the
process grows by up to a third before it settles.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory in the process; call it before the large tensors are made.

    The process never shrinks. Without glibc, this does nothing.

    Returns:
        whether it took effect.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    largest = 2**31 - 1
    wanted = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: largest, M_TOP_PAD: 64 * 2**20}
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted.items())
