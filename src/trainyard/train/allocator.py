"""Memory of the process on a CPU: kept when it is freed, for the next step to use.

glibc maps a large tensor anew each time it is made and unmaps it when it is dropped, and every step
pays for the kernel's zeroing of the same gigabytes. Kept, they are used again. The price: glibc's
aligned allocations leave gaps, so that the process grows by up to a third before it settles.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory in the process; call it before the large tensors are made.

    The process stays as large as it ever was. Where the C library is another than glibc, nothing
    happens.

    Returns:
        whether it was done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    largest = 2**31 - 1
    wanted = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: largest, M_TOP_PAD: 64 * 2**20}
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted.items())
