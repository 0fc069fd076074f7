"""`trainyard report`: one HTML file that shows how runs went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_folders: Annotated[list[Path], typer.Argument(help="One run folder, or several.")],
    output: Annotated[
        Path | None, typer.Option(help="The file to write; default: report.html in the first run.")
    ] = None,
) -> None:
    """Write curves, samples and settings of runs to one HTML file that needs no network.

    Example: trainyard report runs/tiny

    Example: trainyard report runs/small runs/large --output compare.html

    Each curve is also written as a PNG into the plots/ folder of its run.
    """
    from trainyard.report.page import write_report

    output = output or run_folders[0] / "report.html"
    write_report(run_folders, output)
    typer.echo(f"wrote {output}")
