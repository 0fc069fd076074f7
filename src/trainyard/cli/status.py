"""`trainyard status`: a run's status, from its folder and its scheduler, on a login node."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import RUNS_FOLDER, complete_run, find_run, run_names
from trainyard.errors import UserError, printable
from trainyard.log import build_console

if TYPE_CHECKING:
    from trainyard.report.status import StatusReader

FOLLOWED = ("waiting", "starting", "training")
"""States that can change without a command."""
INTERVAL_SECONDS = 1.0


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run, or its folder; absent: all in runs/.", autocompletion=complete_run
        ),
    ] = None,
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

    if is_followed and (as_json or run is None):
        raise UserError("--follow needs a run, and prints no JSON", "trainyard status RUN --follow")
    if run is None:
        _list_runs(as_json=as_json)
        return
    reader = StatusReader(find_run(run))
    if is_followed:
        with suppress(KeyboardInterrupt):
            _follow(reader)
    else:
        report = reader.read()
        typer.echo(json.dumps(report.as_json(), indent=2) if as_json else report.render())


def _list_runs(*, as_json: bool) -> None:
    """Prints one row for each run in `runs`; damaged ones with their error."""
    from rich.table import Table

    from trainyard.report.status import StatusReader

    if not (names := run_names()):
        raise UserError(f"no run in {RUNS_FOLDER}/", "trainyard train RUN_FILE starts one")
    table, found = Table("run", "state", "step", "loss", "last step", box=None), []
    for name in names:
        try:
            report = StatusReader(RUNS_FOLDER / name).read()
        except UserError as error:
            table.add_row(printable(name), "not readable", printable(error.problem))
        else:
            table.add_row(printable(name), *report.row())
            found.append(report.as_json())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        build_console().print(table)


def _follow(reader: StatusReader) -> None:
    from rich.live import Live

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
