"""Reports checkpoints saved during training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from trainyard.checkpoint.background import AsyncCheckpointer, SaveTimes
from trainyard.errors import EXIT_HOLD, MachineError
from trainyard.train.metrics import Metrics
from trainyard.train.stop import StopReason
from trainyard.units import format_bytes

FAILURES_LIMIT = 3


class Saves:
    """Reports finished saves, and stops training after repeated failures.

    Args:
        saver: writes checkpoints.
        metrics: receives an event for each save.
        show: called with (step, text).
    """

    def __init__(
        self, saver: AsyncCheckpointer, metrics: Metrics, show: Callable[[int, str], None]
    ) -> None:
        self._saver = saver
        self._metrics = metrics
        self._show = show
        self._shown: SaveTimes | None = None
        self._n_failures = 0

    def stop_request(self, step: int) -> str | None:
        """Reports saves finished since the last step; returns a request as `Stop` does."""
        times = self._saver.last
        if times is not None and times is not self._shown:
            self._shown = times
            self._n_failures = 0
            self._metrics.write(
                "save",
                {
                    "step": times.step,
                    "stall_seconds": times.stall_seconds,
                    "seconds": times.seconds,
                    "bytes": times.n_bytes,
                },
            )
            self._show(
                step,
                f"saved step {times.step}: {format_bytes(times.n_bytes)} in "
                f"{times.seconds:.1f} s, training stalled for {times.stall_seconds:.2f} s",
            )
        failure = self._saver.take_failure()
        if failure is None:
            return None
        self._n_failures += 1
        self._metrics.write("save failed", {"step": step, "problem": failure.problem})
        self._show(step, f"warning: {failure.problem}; training continues, and will save again")
        if self._n_failures < FAILURES_LIMIT:
            return None
        return str(
            StopReason(f"{self._n_failures} checkpoints in a row could not be saved", EXIT_HOLD)
        )

    def pause(self, step: int) -> None:
        """Waits for any save in flight, and reports it."""
        with suppress(MachineError):
            self._saver.wait()
        self.stop_request(step)

    def finish(self, step: int) -> None:
        """Waits for the last save and reports it.

        Raises:
            MachineError: it failed.
        """
        self._saver.wait()
        self.stop_request(step)
