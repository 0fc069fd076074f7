"""Times a call on a device: the median of rounds, each long enough for the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 5
MOST_CALLS = 1000

Agree = Callable[[float], float]
"""Returns the maximum over all calling ranks."""


def seconds_of(
    work: Callable[[], object],
    device: torch.device,
    budget_seconds: float,
    agree: Agree = lambda seconds: seconds,
) -> tuple[float, int]:
    """Times a call, after two warm-up calls.

    Args:
        work: the call; it may return before the device is done.
        device: where it computes.
        budget_seconds: for all rounds together; a longer call is timed once.
        agree: for collective calls, so that all ranks make the same number of calls.

    Returns:
        the median, and the number of timed calls.
    """
    _time(work, device, 1)
    once = max(1e-9, agree(_time(work, device, 1)))
    n_rounds = min(ROUNDS, max(1, int(budget_seconds / once)))
    n_calls = min(MOST_CALLS, max(1, int(budget_seconds / n_rounds / once)))
    seconds = [_time(work, device, n_calls) / n_calls for _ in range(n_rounds)]
    return statistics.median(seconds), n_rounds * n_calls


def _time(work: Callable[[], object], device: torch.device, n_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(n_calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
