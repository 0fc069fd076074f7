"""Waiting for what must happen: a busy machine makes it late, and no test red."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

SHOW_STACKS = signal.SIGQUIT
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
        for each in (pid, *_descendants(pid)):
            _show_stacks(each)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _descendants(pid: int) -> Iterator[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _show_stacks(pid: int) -> None:
    """Makes a fork that has been told so (`tests.command.be_process`) print its stacks."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if caught and int(caught[1], 16) >> SHOW_STACKS - 1 & 1:
        os.kill(pid, SHOW_STACKS)
        time.sleep(1)  # for its print: the test has failed already, and nothing depends on it


def prepare_fork() -> None:
    """Returns when no other thread of this process is at work.

    What a thread has half done stays so in a fork, which has no such thread; one of Python's is
    at work for a moment even after it was joined.
    """
    import torch

    for name in ("torch._dynamo", "trainyard.parallel.data", "trainyard.parallel.pipeline"):
        import_module(name)  # at first use in every fork it would take seconds
    torch.set_num_threads(1)
    tasks = Path("/proc/self/task")
    own = str(threading.get_native_id())
    wait_until(lambda: not any(_is_at_work(task) for task in tasks.iterdir() if task.name != own))


def _is_at_work(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD"
    except OSError:  # it has ended
        return False
