"""`trainyard watch`: shows a run in the terminal while it trains."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

LAST_LINES = 10
INTERVAL_SECONDS = 1.0


def watch(
    run_folder: Annotated[Path, typer.Argument(help="A run folder, such as runs/my-run.")],
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
) -> None:
    """Show a run while it trains: progress, loss, speed, memory, checkpoints, restarts.

    Example: trainyard watch runs/tiny

    Without a terminal, prints one line per event. Exits when the run ends, or on Ctrl-C, which does
    not affect the run.
    """
    from rich.console import Console

    watched = _Watched(run_folder)
    console = Console()
    try:
        if once:
            watched.read()
            console.print(watched.render(console))
        elif console.is_terminal:
            _watch_on_a_terminal(watched, console)
        else:
            _follow(watched)
    except KeyboardInterrupt:
        pass


class _Watched:
    """A run folder, polled for new lines."""

    def __init__(self, folder: Path) -> None:
        from trainyard.report.history import History
        from trainyard.report.liveness import find_liveness
        from trainyard.report.metrics import MetricsFile
        from trainyard.report.summary import load_run_of

        self._folder = folder
        self._name = load_run_of(folder).name
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._metrics = History().metrics("")
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.liveness = find_liveness(folder)

    def read(self) -> list[str]:
        """Reads new metrics; returns the newest as text."""
        from trainyard.report.liveness import find_liveness
        from trainyard.report.screen import describe_line

        # Before the metrics: so the last lines of an ended run are read below.
        self.liveness = find_liveness(self._folder)
        new: deque[str] = deque(maxlen=LAST_LINES)
        if (self._folder / "metrics.jsonl").exists():
            newest = deque(self._file.new_lines(), maxlen=LAST_LINES)
            if newest:
                self._metrics = self._file.metrics()
            n_steps = self._n_steps()
            new.extend(text for line in newest if (text := describe_line(line, n_steps)))
        self._last.extend(new)
        return list(new)

    def render(self, console: Console) -> RenderableType:
        from trainyard.report.screen import Screen, render_screen

        screen = Screen(self._name, self._n_steps(), self._metrics, self.liveness, self._last)
        in_unicode = console.encoding.startswith("utf")
        return render_screen(screen, console.width, console.height, in_unicode=in_unicode)

    def _n_steps(self) -> int | None:
        from trainyard.report.summary import load_facts

        n_steps = load_facts(self._folder / "plan.json").get("n_steps")
        return n_steps if isinstance(n_steps, int) and n_steps > 0 else None


def _watch_on_a_terminal(watched: _Watched, console: Console) -> None:
    from rich.live import Live

    watched.read()
    with Live(watched.render(console), console=console, auto_refresh=False) as live:
        while watched.liveness.is_training:
            time.sleep(INTERVAL_SECONDS)
            watched.read()
            live.update(watched.render(console), refresh=True)


def _follow(watched: _Watched) -> None:
    while True:
        for line in watched.read():
            typer.echo(line)
        if not watched.liveness.is_training:
            break
        time.sleep(INTERVAL_SECONDS)
    typer.echo(watched.liveness.text)
