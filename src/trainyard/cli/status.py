"""`trainyard status`: a run's status, from its folder and its scheduler, on a login node."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import RUNS_FOLDER, complete_run_or_set, find_run, run_names, set_names
from trainyard.errors import UserError, printable
from trainyard.log import build_console

if TYPE_CHECKING:
    from trainyard.report.run_view import RunReader

FOLLOWED = ("waiting", "starting", "training")
"""States that can change without a command."""
INTERVAL_SECONDS = 1.0


def status(
    run: Annotated[str | None, typer.Argument(autocompletion=complete_run_or_set)] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    is_followed: Annotated[bool, typer.Option("--follow", "-f")] = False,
) -> None:
    """Show a run's state, step, loss, speed, ETA and restarts.

    Example: trainyard status gpt3-13b --follow

    Reads the run folder, and queries squeue or qstat if present: run it where you launched from.
    With --follow, a terminal also shows the loss curve and the newest lines; without a terminal,
    it prints one line per event. Ctrl-C ends it and does not affect the run.

    Of a set of runs it shows the results so far; with --follow first each change of its states.

    Options:
        run: A run or a set of runs, or its folder; absent: all in runs/.
        as_json: Print JSON for programs.
        is_followed: Show it live until the run ends.
    """
    from trainyard.report.run_view import RunReader
    from trainyard.report.status import render_status, status_as_json
    from trainyard.sweeps.sets import is_set

    if is_followed and (as_json or run is None):
        raise UserError("--follow needs a run, and prints no JSON", "trainyard status RUN --follow")
    if run is None:
        _list_runs(as_json=as_json)
        return
    if is_set(run):
        with suppress(KeyboardInterrupt):
            _show_set(run, as_json=as_json, is_followed=is_followed)
        return
    reader = RunReader(find_run(run))
    if is_followed:
        with suppress(KeyboardInterrupt):
            _follow(reader)
    else:
        view = reader.read()
        typer.echo(json.dumps(status_as_json(view), indent=2) if as_json else render_status(view))


def _list_runs(*, as_json: bool) -> None:
    """Prints one row for each run or set of runs in `runs`; damaged ones with their error."""
    from rich.table import Table

    from trainyard.report.run_view import RunReader
    from trainyard.report.status import status_as_json, status_row
    from trainyard.sweeps.results import read_results, results_row
    from trainyard.sweeps.sets import read_set

    rows: dict[str, tuple[str, ...]] = {}
    readable, members = [], set()
    sets, runs = set_names(), run_names()
    for name in [*sets, *runs]:
        if name in members:
            continue
        try:
            if name in sets:
                results = read_results(read_set(name))
                members |= {one.member.name for one in results.members}
                rows[name], facts = results_row(results), results.as_json()
            else:
                view = RunReader(RUNS_FOLDER / name).read()
                rows[name], facts = status_row(view), status_as_json(view)
        except UserError as error:
            rows[name] = ("not readable", printable(error.problem))
        else:
            readable.append(facts)
    if not rows:
        raise UserError(f"no run in {RUNS_FOLDER}/", "trainyard train RUN_FILE starts one")
    if as_json:
        typer.echo(json.dumps(readable, indent=2))
        return
    table = Table("run", "state", "step", "loss", "last step", box=None)
    for name, row in sorted(rows.items()):
        table.add_row(printable(name), *row)
    build_console().print(table)


def _show_set(name: str, *, as_json: bool, is_followed: bool) -> None:
    """Prints the results of a set and the state of its job; with `is_followed` each change."""
    from trainyard.jobs.status import ask_scheduler, read_current
    from trainyard.sweeps.results import read_results, render_results
    from trainyard.sweeps.sets import read_set

    before, results = "", read_results(read_set(name))
    while is_followed and any(one.state in FOLLOWED for one in results.members):
        if results.state != before:
            typer.echo(results.state)
        before = results.state
        time.sleep(INTERVAL_SECONDS)
        results = read_results(read_set(name))
    submission = read_current(results.run_set.folder)
    job = ask_scheduler(submission) if submission else None
    if as_json:
        typer.echo(json.dumps(results.as_json() | {"job": job and asdict(job)}, indent=2))
        return
    typer.echo(render_results(results))
    if submission and job:
        typer.echo(printable(f"job {submission.job} on {submission.cluster}: {job.text}"))


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
