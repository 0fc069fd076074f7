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
    """Opens streams that the caller has closed, or a file of the run would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))  # noqa: PTH123, SIM115


def _leave(number: int, _frame: FrameType | None) -> None:
    """Ends every verb that has no better answer, so that its own processes end with it."""
    with suppress(OSError):  # of a terminal that is gone
        os.write(2, f"ended by {signal.Signals(number).name}\n".encode())
    raise SystemExit(128 + number)


if __name__ == "__main__":
    start()
