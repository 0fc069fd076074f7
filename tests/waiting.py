"""Waiting for what must happen: a busy machine makes it late, and no test red."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

WATCHDOG_SECONDS = 900.0
"""Ten times what the longest wait takes on an idle machine: after it something hangs."""


def wait_until(holds: Callable[[], object], what: str = "") -> None:
    """Returns once something has come true.

    Raises:
        TimeoutError: it never does; says `what`.
    """
    end = time.monotonic() + WATCHDOG_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {WATCHDOG_SECONDS:g} s: {what}")
        time.sleep(0.01)


def wait_for(pid: int) -> int:
    """Waits for a child process to end, which it does whatever happens; gives its exit code."""
    try:
        wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), f"{pid}")
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
