"""The signals that ask training to save and stop, for ranks, their parents and job scripts.

SIGTERM comes from schedulers, SIGUSR1 and SIGUSR2 from those that warn before a limit, SIGXCPU from
a limit of CPU time, SIGHUP from a terminal that closes, SIGINT from Ctrl-C.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

REQUEUE = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
STOP = (signal.SIGINT, *REQUEUE)


@contextmanager
def handle_signals(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handles signals inside its block, except those that are ignored, as SIGHUP under nohup.

    Scripts let what they start in the background ignore SIGINT, so that one is always handled.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGXCPU:  # the kernel sends it again every second
            signal.signal(number, signal.SIG_IGN)
        if number == signal.SIGHUP:
            _forget_lost_terminal()
        handler(number, frame)

    before = {
        number: signal.signal(number, handle)
        for number in numbers
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def note_signals(numbers: Sequence[signal.Signals]) -> Iterator[list[signal.Signals]]:
    """Yields a list that collects these signals as they arrive."""
    received: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    with handle_signals(numbers, note):
        yield received


def _forget_lost_terminal() -> None:
    """Drops further output to a terminal that is gone: writing to it would fail."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
