"""`trainyard train`: one run file to checkpoints, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

RUNS_FOLDER = Path("runs")


def train(
    run_file: Annotated[str, typer.Argument(help="A run file (.toml) or the name of a preset.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.field=value, as many as needed.")
    ] = None,
    resume: Annotated[
        Literal["auto", "must", "never"],
        typer.Option(help="auto continues where there is a checkpoint, must insists on one."),
    ] = "auto",
) -> None:
    """Train a run; its folder is runs/NAME.

    Example: trainyard train recipes/laptop/gpt-10m.toml train.length="500 steps"

    Ctrl-C and SIGTERM save at the next step and exit with 0; the same command continues.
    """
    from trainyard.config.load import load_run
    from trainyard.plan.resolve import resolve

    run = load_run(run_file, overrides).run
    resolve(run)  # refuses what cannot be before torch takes its seconds to import
    from trainyard.train.worker import run_worker, write_run_folder

    folder = RUNS_FOLDER / run.name
    write_run_folder(folder, run, resume)
    run_worker(folder, resume)
