"""`trainyard status`: a run's status, from its folder and its scheduler, on a login node."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import RUNS_FOLDER, complete_run, find_run, run_names
from trainyard.errors import UserError, printable
from trainyard.log import build_console

if TYPE_CHECKING:
    from trainyard.report.run_view import RunReader

FOLLOWED = ("waiting", "starting", "training")
"""States that can change without a command."""
INTERVAL_SECONDS = 1.0


def status(
    run: Annotated[str | None, typer.Argument(autocompletion=complete_run)] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    is_followed: Annotated[bool, typer.Option("--follow", "-f")] = False,
) -> None:
    """Show a run's state, step, loss, speed, ETA and restarts.

    Example: trainyard status gpt3-13b --follow

    Reads the run folder, and queries squeue or qstat if present: run it where you launched from.
    With --follow, a terminal also shows the loss curve and the newest lines; without a terminal,
    it prints one line per event. Ctrl-C ends it and does not affect the run.

    Options:
        run: A run, or its folder; absent: all in runs/.
        as_json: Print JSON for programs.
        is_followed: Show it live until the run ends.
    """
    from trainyard.report.run_view import RunReader
    from trainyard.report.status import render_status, status_as_json

    if is_followed and (as_json or run is None):
        raise UserError("--follow needs a run, and prints no JSON", "trainyard status RUN --follow")
    if run is None:
        _list_runs(as_json=as_json)
        return
    reader = RunReader(find_run(run))
    if is_followed:
        with suppress(KeyboardInterrupt):
            _follow(reader)
    else:
        view = reader.read()
        typer.echo(json.dumps(status_as_json(view), indent=2) if as_json else render_status(view))


def _list_runs(*, as_json: bool) -> None:
    """Prints one row for each run in `runs`; damaged ones with their error."""
    from rich.table import Table

    from trainyard.report.run_view import RunReader
    from trainyard.report.status import status_as_json, status_row

    if not (names := run_names()):
        raise UserError(f"no run in {RUNS_FOLDER}/", "trainyard train RUN_FILE starts one")
    table, readable = Table("run", "state", "step", "loss", "last step", box=None), []
    for name in names:
        try:
            view = RunReader(RUNS_FOLDER / name).read()
        except UserError as error:
            table.add_row(printable(name), "not readable", printable(error.problem))
        else:
            table.add_row(printable(name), *status_row(view))
            readable.append(view)
    if as_json:
        typer.echo(json.dumps([status_as_json(view) for view in readable], indent=2))
    else:
        build_console().print(table)


def _follow(reader: RunReader) -> None:
    from rich.live import Live

    from trainyard.report.run_view import N_LINES
    from trainyard.report.status import describe_line, render_screen

    console = build_console()
    last: deque[str] = deque(maxlen=N_LINES)
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        while True:
            view = reader.read()
            texts = (describe_line(line, view.n_steps) for line in reader.new_lines)
            new = [text for text in texts if text]
            last.extend(new)
            if live:
                unicode = console.encoding.startswith("utf")
                screen = render_screen(view, last, *console.size, in_unicode=unicode)
                live.update(screen, refresh=True)
            else:
                for line in new:
                    typer.echo(line)
            if view.state not in FOLLOWED:
                break
            time.sleep(INTERVAL_SECONDS)
    if live is None:
        typer.echo(view.text)
