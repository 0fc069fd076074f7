"""Startup times of a process, part by part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StartupTimes:
    """Seconds of each part of startup, up to the second step.

    Args:
        spawned_at: when the process was requested, seconds since 1970.
    """

    def __init__(self, spawned_at: float) -> None:
        self.seconds = {"process": max(0.0, time.time() - spawned_at)}

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Times its block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
