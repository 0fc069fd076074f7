"""`trainyard train`: trains a run file, on this machine or as one rank of many."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trainyard.cli.names import Overrides, Ranks, RunFile


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[
        Literal["auto", "must", "never"],
        typer.Option(help="auto: resume if there is a checkpoint; must: fail without one."),
    ] = "auto",
    ranks: Ranks = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Shorten the run and its schedule to about this training time on this machine.",
        ),
    ] = None,
    log: Annotated[
        Literal["short", "full"], typer.Option(help="Log lines: short, or full for every metric.")
    ] = "short",
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Remove the run's checkpoints and metrics; start over."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Train even if memory or disk seem too small.")
    ] = False,
) -> None:
    """Train a run in the folder runs/NAME.

    Example: trainyard train recipes/laptop/gpt-10m.toml train.length="500 steps"

    Example: trainyard train web.toml --minutes 10

    Example: trainyard train web train.length="2000 steps"

    Ctrl-C, SIGTERM, SIGHUP and a file STOP in the run folder save at the next step and exit; the
    same command continues, or with a greater train.length goes on beyond the end. Exit codes: 0
    done; 130 Ctrl-C; 75 start it again; 93 held, needs attention; 2 fix the reported error. Under
    torchrun, srun or mpiexec this command is one rank: start it once per rank.
    """
    from trainyard.api.running import Training, train_run

    options = Training(
        run_file, overrides or (), resume, ranks, minutes, log, overwrite=overwrite, force=force
    )
    if code := train_run(options):
        raise typer.Exit(code)
