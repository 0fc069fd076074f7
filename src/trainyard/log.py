"""Logging, and progress bars that adapt to the terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

PLAIN_LINE_EVERY_SECONDS = 10.0


def build_logger(hide: Callable[[str], str] = str) -> logging.Logger:
    """Sets up the program's logger: plain lines on standard error.

    Args:
        hide: removes secrets from each line.
    """
    logger = logging.getLogger("trainyard")
    if not logger.handlers:
        handler = _StandardErrorHandler()
        handler.setFormatter(_HidingFormatter(hide))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


class _HidingFormatter(logging.Formatter):
    """Formats only the message, and the traceback if there is one."""

    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__("%(message)s")
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, so that a progress bar stays below the lines."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _value: TextIO) -> None:
        pass


class ProgressUpdate(Protocol):
    """Reports the progress of a long job."""

    def __call__(self, done: float, total: float, detail: str = "") -> None:
        """Shows `done` of `total`, with a short text."""


@contextmanager
def show_progress(title: str, *, plain_lines: bool = True) -> Iterator[ProgressUpdate]:
    """Yields a function that shows progress: a bar on a terminal, else plain lines.

    Args:
        title: name of the job.
        plain_lines: without a terminal, print a line every few seconds.
    """
    # Imported here: every verb imports this file, few show progress.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    # FORCE_COLOR, which Jupyter sets, asks for colours, not for a bar in a file.
    if not (console.is_terminal and sys.stderr.isatty()):
        yield _PlainProgress(title, PLAIN_LINE_EVERY_SECONDS if plain_lines else float("inf"))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None, detail="")

        def update(done: float, total: float, detail: str = "") -> None:
            progress.update(task, completed=done, total=total, detail=detail)

        yield update


class _PlainProgress:
    """One line every few seconds, for logs of batch jobs."""

    def __init__(self, title: str, interval_seconds: float) -> None:
        self._title = title
        self._interval_seconds = interval_seconds
        self._next_line_time = time.monotonic() + interval_seconds

    def __call__(self, done: float, total: float, detail: str = "") -> None:
        now = time.monotonic()
        if now >= self._next_line_time:
            self._next_line_time = now + self._interval_seconds
            share = 100 * done / total if total else 0.0
            logging.getLogger("trainyard").info("%s %.0f%% %s", self._title, share, detail)
