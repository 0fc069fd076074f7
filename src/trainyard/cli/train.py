"""`trainyard train`: trains a run file, on this machine or as one rank of many."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from trainyard.cli.names import Overrides, Ranks, RunFile


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Literal["auto", "must", "never"] = "auto",
    ranks: Ranks = None,
    minutes: Annotated[float | None, typer.Option(min=0.01)] = None,
    log: Literal["short", "full"] = "short",
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
    force: Annotated[bool, typer.Option("--force")] = False,
) -> None:
    """Train a run in the folder runs/NAME.

    Example: trainyard train recipes/laptop/gpt-10m.toml train.length="500 steps"

    Example: trainyard train web.toml --minutes 10

    Example: trainyard train web train.length="2000 steps"

    Ctrl-C, SIGTERM, SIGHUP and a file STOP in the run folder save at the next step and exit; the
    same command continues, or with a greater train.length goes on beyond the end. Exit codes: 0
    done; 130 Ctrl-C; 75 start it again; 93 held, needs attention; 2 fix the reported error. Under
    torchrun, srun or mpiexec this command is one rank: start it once per rank.

    Options:
        resume: auto: resume if there is a checkpoint; must: fail without one.
        minutes: Shorten the run and its schedule to about this training time on this machine.
        log: Log lines: short, or full for every metric.
        overwrite: Remove the run's checkpoints and metrics; start over.
        force: Train even if memory or disk seem too small.
    """
    from trainyard.api.running import Training, train_run

    options = Training(
        run_file, overrides or (), resume, ranks, minutes, log, overwrite=overwrite, force=force
    )
    if code := train_run(options):
        raise typer.Exit(code)
