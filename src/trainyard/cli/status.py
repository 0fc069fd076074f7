"""`trainyard status`: a run's status, from its folder and its scheduler, on a login node."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import complete_run, find_run
from trainyard.errors import UserError

if TYPE_CHECKING:
    from trainyard.report.status import StatusReader

FOLLOWED = ("waiting", "starting", "training")
"""States that can change without a command."""
INTERVAL_SECONDS = 1.0


def status(
    run: Annotated[str, typer.Argument(help="A run, or its folder.", autocompletion=complete_run)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    is_followed: Annotated[
        bool, typer.Option("--follow", "-f", help="Show it live until the run ends.")
    ] = False,
) -> None:
    """Show a run's state, step, loss, speed, ETA and restarts.

    Example: trainyard status gpt3-13b --follow

    Reads the run folder, and queries squeue or qstat if present: run it where you launched from.
    With --follow, a terminal also shows the loss curve and the newest lines; without a terminal,
    it prints one line per event. Ctrl-C ends it and does not affect the run.
    """
    from trainyard.report.status import StatusReader

    if as_json and is_followed:
        raise UserError("--follow prints no JSON", "choose --follow or --json")
    reader = StatusReader(find_run(run))
    if is_followed:
        with suppress(KeyboardInterrupt):
            _follow(reader)
    else:
        report = reader.read()
        typer.echo(json.dumps(report.as_json(), indent=2) if as_json else report.render())


def _follow(reader: StatusReader) -> None:
    from rich.live import Live

    from trainyard.log import build_console
    from trainyard.report.screen import describe_line, render_screen
    from trainyard.report.status import N_LINES

    console = build_console()
    last: deque[str] = deque(maxlen=N_LINES)
    with ExitStack() as stack:
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        while True:
            status = reader.read()
            new = [describe_line(line, status.n_steps) for line in reader.new_lines]
            last.extend(filter(None, new))
            if live:
                unicode = console.encoding.startswith("utf")
                width, height = console.size
                live.update(
                    render_screen(status, last, width, height, in_unicode=unicode), refresh=True
                )
            else:
                for line in filter(None, new):
                    typer.echo(line)
            if status.state not in FOLLOWED:
                break
            time.sleep(INTERVAL_SECONDS)
    if live is None:
        typer.echo(status.text)
