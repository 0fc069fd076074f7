"""Starts the command: a signal that ends it, during its imports too, lets it clean up first."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from trainyard.launch.signals import handle_signals

EXIT_INTERRUPTED = 130


def start() -> None:
    """Imports the command line and runs it."""
    _open_closed_streams()
    try:
        with handle_signals((signal.SIGTERM, signal.SIGHUP), _leave):
            from trainyard.cli.main import main

            main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


def _open_closed_streams() -> None:
    """Starts again with the streams that the caller closed: a file would get their numbers."""
    streams = enumerate((sys.stdin, sys.stdout, sys.stderr))
    closed = [number for number, stream in streams if stream is None]
    for number in closed:
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
        os.set_inheritable(number, True)
    if closed:
        os.execv(sys.executable, sys.orig_argv)


def _leave(number: int, _frame: FrameType | None) -> None:
    """Ends every verb that has no better answer, so that its own processes end with it."""
    with suppress(OSError):  # of a terminal that is gone
        os.write(2, f"ended by {signal.Signals(number).name}\n".encode())
    raise SystemExit(128 + number)


if __name__ == "__main__":
    start()
