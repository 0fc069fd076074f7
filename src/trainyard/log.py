"""Logging, and progress bars that adapt to the terminal."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from trainyard.errors import escape

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PLAIN_LINE_EVERY_SECONDS = 10.0
COPIED = "arguments for"
"""The beginning of lines that people copy to the command line: they are never broken."""


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
    """Formats only the message, and the traceback if there is one; escapes control characters."""

    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__("%(message)s")
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return escape(self._hide(super().format(record)))


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, so that a progress bar stays below the lines."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _value: TextIO) -> None:
        pass


def escape_output() -> None:
    """Escapes control characters in all that this program prints, except by `build_console`."""
    os.environ.setdefault("PYTHON_COLORS", "0")  # tracebacks of Python 3.13
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not hasattr(stream, "unescaped"):
            write = stream.write
            vars(stream).update(unescaped=write, write=lambda text, to=write: to(escape(text)))


def build_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Builds a console of rich: its styles reach the terminal, control characters of a text do not.

    Args:
        stderr: print to standard error.
        soft_wrap: never wrap lines of text.
    """
    # Imported here: every verb imports this file, few print tables.
    from rich.console import Console
    from rich.segment import Segment

    class Escaping(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for part in super().render(renderable, options):
                yield part if part.control else Segment(escape(part.text), part.style)

    file: Any = _Unescaped(sys.stderr if stderr else sys.stdout)
    return Escaping(file=file, soft_wrap=soft_wrap, highlight=False, markup=False)


def print_lines(text: Text) -> None:
    """Prints a text; a terminal breaks long lines between words, and indents to their column."""
    from rich.text import Text

    console = build_console(soft_wrap=True)
    for line in text.split("\n"):
        if not console.is_terminal or line.plain.startswith(COPIED):
            console.print(line)
            continue
        starts = [match.end() for match in re.finditer(r"\s{2,}(?=\S)", line.plain)]
        indent = max([start for start in starts if start < console.width / 2], default=0)
        console.print(line[:indent], end="")
        parts = line[indent:].wrap(console, console.width - indent)
        console.print(Text(f"\n{'':{indent}}").join(parts))


def facts_table(title: str, facts: dict[str, str]) -> Table:
    """Renders names and values below a title."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(escape(title)), title_justify="left", show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(Text(escape(name)), Text(escape(value)))
    return table


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Formats rows of cells as columns that are two spaces apart.

    Args:
        rows: of equal length.
        right: numbers of the columns that are aligned at their right edge, as numbers are.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


class _Unescaped:
    """A stream without `escape_output`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.write = getattr(stream, "unescaped", stream.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
    from rich import progress as bars

    console = build_console(stderr=True)
    # FORCE_COLOR, which Jupyter sets, asks for colours, not for a bar in a file.
    if not (console.is_terminal and sys.stderr.isatty()):
        yield _log_progress(title, PLAIN_LINE_EVERY_SECONDS if plain_lines else float("inf"))
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[detail]}"),
    )
    with bars.Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None, detail="")

        def update(done: float, total: float, detail: str = "") -> None:
            progress.update(task, completed=done, total=total, detail=detail)

        yield update


def _log_progress(title: str, interval_seconds: float) -> ProgressUpdate:
    """Logs one line every few seconds, for batch jobs."""
    next_line_time = time.monotonic() + interval_seconds

    def update(done: float, total: float, detail: str = "") -> None:
        nonlocal next_line_time
        now = time.monotonic()
        if now >= next_line_time:
            next_line_time = now + interval_seconds
            share = 100 * done / total if total else 0.0
            logging.getLogger("trainyard").info("%s %.0f%% %s", title, share, detail)

    return update
