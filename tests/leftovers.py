"""What a test has begun and left: ended when the test is over, so that no other suffers from it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def ended_with_the_block() -> Iterator[None]:
    """Ends the processes begun in its block; one with a session of its own has another owner."""
    before = set(_children(os.getpid()))
    try:
        yield
    finally:
        for pid in _children(os.getpid()):
            if pid not in before and _is_ours(pid):
                for each in (pid, *_descendants(pid)):
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


@contextmanager
def logging_as_before() -> Iterator[None]:
    """Undoes what its block has set up for the program's log: else later tests would print it."""
    logger = logging.getLogger("trainyard")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def collect_what_failed() -> None:
    """Lets go of a failed test's stack now, and so of its pipes and files.

    Else Python does in the midst of the next test, which fails by the complaints about them.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _descendants(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (child, *_descendants(child))]


def _is_ours(pid: int) -> bool:
    """Whether it is of this session, and nothing that Python itself keeps beside it."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return os.getsid(pid) == os.getsid(0) and b"multiprocessing.resource_tracker" not in command
    except OSError:
        return False
