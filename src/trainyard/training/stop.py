"""Requests to save or stop training, and the exit code for the scheduler.

    request                                      action           exit code
    SIGTERM and others (`launch/signals.py`)     save and stop    75: start the same command again
    train.stop_after_minutes, the job's limit    save and stop    75
    Ctrl-C (SIGINT), a file STOP in the folder   save and stop    93: held, not started again
    a file SAVE in the folder                    save, continue

One rank's request is enough: all ranks agree at the end of every step. A second signal ends the
process at once; finished checkpoints stay intact. `trainyard train`, unless a job script or a
launcher started it, ends with 130 after Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainyard.errors import EXIT_HOLD, EXIT_REQUEUE, GuardError
from trainyard.launch import signals
from trainyard.units import format_seconds

logger = logging.getLogger("trainyard")

STOP, SAVE = "STOP", "SAVE"
LEAST_MARGIN_SECONDS = 60.0
TWICE_SECONDS = 1.0
"""Slurm signals a rank and its parent, which forwards the signal: both are one request."""


@dataclass(frozen=True)
class StopReason:
    """Why training ended, and its exit code."""

    reason: str
    exit_code: int = 0

    def __str__(self) -> str:
        return f"{self.exit_code} {self.reason}"

    @classmethod
    def of(cls, request: str | None) -> StopReason | None:
        """Parses its text; None for other requests or none."""
        if request is None or request == SAVE:
            return None
        code, _, reason = request.partition(" ")
        return cls(reason, int(code))


class LostFolderError(GuardError):
    """The run folder is no longer the one in which this run trains: nothing may be written."""


DONE = StopReason("done")
INTERRUPTED = StopReason("received SIGINT", EXIT_HOLD)


def out_of_time(minutes: float) -> str:
    """Returns the reason when train.stop_after_minutes ends a run."""
    return f"train.stop_after_minutes={minutes:g} has elapsed"


class Stop:
    """Collects stop and save requests.

    Args:
        folder: the run folder, where the first rank looks for files; None on other ranks.
        stop_after_minutes: wall-clock limit from now on.
        scheduler_seconds: until the scheduler ends the job; None if unknown. A limit in the past is
            of an earlier job, or of another clock.
        save_seconds: how long the last save took.
    """

    def __init__(
        self,
        folder: Path | None,
        stop_after_minutes: float = float("inf"),
        scheduler_seconds: float | None = None,
        save_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if scheduler_seconds is not None and scheduler_seconds < 0:
            ago = format_seconds(-scheduler_seconds)
            logger.warning("the job's time limit in the environment was %s ago: not followed", ago)
            scheduler_seconds = None
        self._folder = folder
        self._started = time.monotonic()
        self._stop_after_minutes = stop_after_minutes
        self._scheduler_seconds, self._save_seconds = scheduler_seconds, save_seconds
        self._signal: signal.Signals | None = None
        self._signalled = 0.0
        self._last_look = self._started
        self._longest = 0.0
        self._identity = _identify(folder)
        self._sees_files = True

    def stop_request(self) -> str | None:
        """Returns the request at the end of a step: a `StopReason` as text, SAVE, or None.

        Raises:
            LostFolderError: the run folder is gone, or another has its name.
        """
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last_look)
        self._last_look = now
        if self._signal is not None:
            if self._signal == signal.SIGINT:
                return str(INTERRUPTED)
            return str(StopReason(f"received {self._signal.name}", EXIT_REQUEUE))
        seconds = now - self._started
        if seconds >= 60 * self._stop_after_minutes:
            return str(StopReason(out_of_time(self._stop_after_minutes), EXIT_REQUEUE))
        # One more step with all that follows it, and a save, must fit.
        margin = max(LEAST_MARGIN_SECONDS, 3 * self._longest) + self._save_seconds()
        if self._scheduler_seconds is not None and seconds + margin >= self._scheduler_seconds:
            left = self._scheduler_seconds - seconds
            return str(StopReason(f"the job's time limit is in {left:.0f} s", EXIT_REQUEUE))
        return self._request_of_files()

    def _request_of_files(self) -> str | None:
        if self._folder is None:
            return None
        request = None
        try:
            if _identify(self._folder) != self._identity:
                raise LostFolderError(
                    f"{self._folder} was removed, moved or replaced while this run trained in it: "
                    "its checkpoints are left only where it was moved",
                    "a moved run continues once its folder has its name again; "
                    "stop a run before you remove its folder",
                )
            if (self._folder / STOP).exists():
                request = str(StopReason(f"there is a file {self._folder / STOP}", EXIT_HOLD))
            elif os.path.lexists(self._folder / SAVE):
                (self._folder / SAVE).unlink()
                request = SAVE
        except OSError as error:
            if self._sees_files:
                logger.warning("cannot look for STOP and SAVE, training continues: %s", error)
            self._sees_files = False
        else:
            self._sees_files = True
        return request

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Turns the first signal into a stop request; a second one ends the process at once."""
        with signals.handle_signals(signals.STOP, self._note):
            yield

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signalled = signal.Signals(number), now
            if number == signal.SIGINT and self._folder is not None:
                # Not through the logger: the signal may have interrupted it.
                start = "\n" if os.isatty(2) else ""
                os.write(2, f"{start}saving after this step; Ctrl-C again: leave now\n".encode())
        elif now - self._signalled > TWICE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _identify(folder: Path | None) -> tuple[int, int] | None:
    """Returns what distinguishes a folder from another of its name; None if there is none.

    The lock keeps the folder open, so that its number stays its own.
    """
    if folder is None or not os.path.lexists(folder):
        return None
    status = folder.stat()
    return status.st_dev, status.st_ino


@contextmanager
def leave_when_told() -> Iterator[None]:
    """Exits for requeue on a signal, except SIGINT, until training catches them.

    Raises:
        SystemExit: 75, if a signal arrives before training catches it; there is nothing to save.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        logger.info("received %s before the first step", signal.Signals(number).name)
        raise SystemExit(EXIT_REQUEUE)

    with signals.handle_signals(signals.REQUEUE, leave):
        yield


def refuse_stopped(folder: Path) -> None:
    """Refuses to start a run while its folder has a file STOP, so that a chain of jobs ends.

    Raises:
        GuardError: it has one.
    """
    if (folder / STOP).exists():
        raise GuardError(f"there is a file {folder / STOP}", "remove it to train this run")
