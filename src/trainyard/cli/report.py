"""`trainyard report`: one HTML report of one or more runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.names import complete_run_or_set, find_run
from trainyard.errors import UserError


def report(
    run_folders: Annotated[list[Path], typer.Argument(autocompletion=complete_run_or_set)],
    output: Path | None = None,
    png: Path | None = None,
    baseline: Annotated[list[str] | None, typer.Option(metavar="NAME=LOSS")] = None,
) -> None:
    """Write curves, samples and settings of runs to one HTML page.

    Example: trainyard report runs/tiny

    Example: trainyard report runs/small runs/large --output compare.html --png figures

    Example: trainyard report runs/mine --baseline "GPT-2 124M=3.29"

    Example: trainyard report web-sweep

    The page needs no other file. The run may still be training, or have been killed; trainyard
    status --follow shows it live. The page of a set of runs compares its settings.

    Options:
        run_folders: Runs, or their folders; or one set of runs.
        output: The file to write; default: report.html in the run, or a page beside several.
        png: A folder for the curves as PNG files, for papers.
        baseline: Another model's held-out loss, in nats per token, as a line to compare with.
    """
    run_folders = [find_run(name) for name in run_folders]
    from trainyard.report.page import write_report
    from trainyard.sweeps.page import write_set_report
    from trainyard.sweeps.results import read_results
    from trainyard.sweeps.sets import is_set, read_set

    if is_set(run_folders[0]) and len(run_folders) == 1:
        if png or baseline:
            raise UserError("--png and --baseline are for runs, not for a set of runs")
        output = output or run_folders[0] / "report.html"
        write_set_report(read_results(read_set(run_folders[0])), output)
        typer.echo(f"wrote {output}")
        return
    first, names = run_folders[0], "-".join(folder.name for folder in run_folders)[:200]
    own = first / "report.html" if len(run_folders) == 1 else first.parent / f"{names}.html"
    output = output or own
    write_report(run_folders, output, png, dict(map(_parse_baseline, baseline or [])))
    typer.echo(f"wrote {output}")
    if png is not None:
        typer.echo(f"wrote the curves as PNG files to {png}")


def _parse_baseline(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        loss = float(value)
    except ValueError:
        loss = math.nan
    if not name or not 0 < loss < math.inf:
        raise UserError(
            f"--baseline {text}: not NAME=LOSS with a positive loss",
            'write, for example, --baseline "GPT-2=3.3", in nats per token',
        )
    return name, loss
