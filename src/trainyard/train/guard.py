"""Decides when training stops before its end: signals and the wall clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Guard:
    """Remembers that somebody asked to stop.

    Args:
        stop_after_minutes: wall-clock limit from now on.
    """

    def __init__(self, stop_after_minutes: float = float("inf")) -> None:
        self._deadline = time.monotonic() + 60 * stop_after_minutes
        self._stop_after_minutes = stop_after_minutes
        self._signal: signal.Signals | None = None

    def reason_to_stop(self) -> str | None:
        """Says why to stop at this step boundary; None while there is no reason."""
        if self._signal is not None:
            return f"received {self._signal.name}"
        if time.monotonic() >= self._deadline:
            return f"train.stop_after_minutes={self._stop_after_minutes:g} is over"
        return None

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Turns the first SIGINT or SIGTERM into a reason to stop; a second one ends at once."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
