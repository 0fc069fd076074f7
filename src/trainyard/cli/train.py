"""`trainyard train`: trains a run file, on this machine or as one rank of many."""

from __future__ import annotations

import faulthandler
import logging
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainyard.cli.names import RUNS_FOLDER, Overrides, Ranks, RunFile, refuse_moved_run
from trainyard.errors import (
    EXIT_HOLD,
    EXIT_INTERRUPTED,
    ConfigError,
    LaunchError,
    MachineError,
    UserError,
)
from trainyard.extras import require
from trainyard.launch.environment import Process, read_process, read_start
from trainyard.launch.lock import hold
from trainyard.launch.restarts import note_refusal
from trainyard.launch.supervise import SupervisedJob, exit_code_below, supervise
from trainyard.units import format_figure, format_number, format_seconds

if TYPE_CHECKING:
    from trainyard.config.run import Run
    from trainyard.planning.resolve import Plan

Resume = Literal["auto", "must", "never"]
LogLines = Literal["short", "full"]

logger = logging.getLogger("trainyard")

WAIT_SECONDS = 60.0
POLL_SECONDS = 0.1


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[
        Resume, typer.Option(help="auto: resume if there is a checkpoint; must: fail without one.")
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
        LogLines, typer.Option(help="Log lines: short, or full for every metric.")
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
    from trainyard.training.stop import leave_when_told

    if minutes is not None and any(text.startswith("train.length=") for text in overrides or ()):
        raise ConfigError(
            "--minutes and train.length= both set the length of the run", "omit one of them"
        )
    process = read_process()
    for option, value in (("--ranks", ranks), ("--minutes", minutes), ("--overwrite", overwrite)):
        process.refuse_option(option, value)
    with leave_when_told():
        run, plan = _load_run(run_file, overrides, process, ranks)
        from trainyard.data.patterns import find_token_files
        from trainyard.planning.room import refuse_without_room
        from trainyard.training.run_folder import begun_run, check_entries, write_run_folder

        folder, n_ranks = RUNS_FOLDER / run.name, plan.n_ranks
        try:
            check_entries(folder)
            begun = None if resume == "never" or overwrite else begun_run(folder)
            run = _follow_length(run, run_file, overrides or [], begun)
            run = find_token_files(run, begun)
            if not force and process.local_rank == 0:
                n_local = process.n_local_ranks if process.n_ranks > 1 else n_ranks
                refuse_without_room(run, plan, n_local, folder)
            if process.rank > 0:
                wait_for_run_folder(folder, run, process)
                code = _supervise(process, n_ranks, folder, resume, log)
            else:
                with hold(folder) as locks:
                    run = _fit_into(minutes, run, folder, n_ranks, begun)
                    if begun is None:
                        convert_start(run, folder)
                    how = "auto" if process.attempt else "overwrite" if overwrite else resume
                    write_run_folder(folder, run, how)
                    code = _train_first_rank(process, n_ranks, folder, resume, log, locks)
        except UserError as error:
            note_refusal(folder, read_start(), error.exit_code)
            raise
    note_refusal(folder, read_start(), code)
    if process.n_ranks == 1 and read_start() is None:
        code = _end_by_hand(folder, code)
    if code != 0:
        raise typer.Exit(code)


def _end_by_hand(folder: Path, code: int) -> int:
    """Returns the exit code for a person: 130 after Ctrl-C, which holds a job with 93."""
    if code == 0:
        name = shlex.quote(folder.name)
        verbs = (f"generate {name}", f"report {name}", f"export {name} --output {name}-gpt")
        logger.info("next: %s", " | ".join(f"trainyard {verb}" for verb in verbs))
    from trainyard.report.run_view import load_facts
    from trainyard.training.stop import INTERRUPTED

    reason = (load_facts(folder / "outcome.json") or {}).get("reason")
    return EXIT_INTERRUPTED if code == EXIT_HOLD and reason == INTERRUPTED.reason else code


def convert_start(run: Run, folder: Path) -> None:
    """Converts `train.start_from` into the run folder, if it is a Hugging Face folder.

    Raises:
        UserError: as `import_huggingface` and `refuse_foreign`.
    """
    from trainyard.export.foreign import refuse_foreign
    from trainyard.training.start import CONVERTED, is_huggingface

    if is_huggingface(run.train.start_from):
        from trainyard.export.from_huggingface import import_huggingface

        shutil.rmtree(folder / CONVERTED, ignore_errors=True)
        import_huggingface(Path(run.train.start_from), folder / CONVERTED)
    elif run.train.start_from:
        refuse_foreign(Path(run.train.start_from))


def _load_run(
    run_file: str, overrides: list[str] | None, process: Process, ranks: int | None
) -> tuple[Run, Plan]:
    """Reads the run, and plans it for the ranks that train it."""
    from trainyard.config.load import load_run
    from trainyard.planning.resolve import resolve

    run = load_run(run_file, overrides).run
    refuse_moved_run(run_file, run.name, overrides or ())
    if process.n_ranks > 1:
        ranks = process.n_ranks
    plan = resolve(run, ranks)  # rejects impossible layouts before the slow import of torch
    require("torch")
    if process.rank == 0:
        _refuse_missing_inputs(run)
    if ranks is None:
        plan = resolve(run, max(plan.n_ranks, _count_gpus()))
    if process.n_ranks == 1 and plan.n_ranks > 1:
        _refuse_missing_gpus(plan.n_ranks)
    return run, plan


def _refuse_missing_inputs(run: Run) -> None:
    """Refuses a run without its data or tokenizer, before torch is imported."""
    from trainyard.data.loader import describe_data
    from trainyard.data.patterns import find_token_files
    from trainyard.data.vocabulary import load_vocabulary
    from trainyard.training.run_folder import refuse_larger_vocabulary, refuse_what_is_not_built

    refuse_what_is_not_built(run)
    describe_data(find_token_files(run, missing_ok=True))
    if run.tokenizer.path:
        refuse_larger_vocabulary(run, len(load_vocabulary(run.tokenizer.path).tokens))


def _refuse_missing_gpus(n_ranks: int) -> None:
    """Refuses more ranks than GPUs, before they start; without GPUs they train on the CPU."""
    n_gpus = _count_gpus()
    if 0 < n_gpus < n_ranks:
        raise MachineError(
            f"{n_ranks} ranks on this machine, where torch sees {format_number(n_gpus, 'GPU')}",
            f"--ranks {n_gpus}; or, to train on the CPU, hide GPUs with CUDA_VISIBLE_DEVICES=",
        )


def _fit_into(
    minutes: float | None, run: Run, folder: Path, n_ranks: int, begun: Run | None
) -> Run:
    """Shortens a run to fit into the minutes, if given, or to the length it was started with."""
    if minutes is None:
        return run
    from trainyard.planning.resolve import resolve
    from trainyard.planning.shorten import shorten, with_lengths_of
    from trainyard.training.stop import refuse_stopped

    refuse_stopped(folder)
    if begun is not None:
        n_steps = resolve(begun).n_steps
        logger.info("%s has started before: it continues to step %s", run.name, f"{n_steps:,}")
        return with_lengths_of(begun, run)
    from trainyard.bench.rounds import time_run

    logger.info("measuring this machine: a few seconds of training steps")
    step_seconds = time_run(run, n_ranks)
    fitted = shorten(run, max(1, int(60 * minutes / step_seconds)))
    logger.info(
        "%s ms per step: %s steps, about %s",
        format_figure(1000 * step_seconds),
        f"{resolve(fitted).n_steps:,}",
        format_seconds(resolve(fitted).n_steps * step_seconds),
    )
    return fitted


def _follow_length(run: Run, source: str, overrides: list[str], begun: Run | None) -> Run:
    """Shortens the schedule of a file that Trainyard wrote with `train.length`, and says so."""
    from trainyard.planning.shorten import describe_too_short, follow_length

    followed = follow_length(run, source, overrides, begun)
    if read_process().rank > 0:
        return followed
    if followed != run:
        warmup = f"schedule.warmup='{followed.schedule.warmup}'"
        logger.info("schedule and intervals of %s follow train.length: %s", source, warmup)
    for problem in describe_too_short(followed):
        logger.warning("warning: %s", problem)
    return followed


def _train_first_rank(
    process: Process, n_ranks: int, folder: Path, resume: Resume, log: LogLines, locks: list[int]
) -> int:
    """Trains rank 0, or all ranks of this machine; returns the exit code."""
    if n_ranks > 1:
        return _supervise(process, n_ranks, folder, resume, log, locks)
    from trainyard.training.worker import run_worker

    faulthandler.enable(file=2)  # nobody else would name a crash
    return exit_code_below(process, run_worker(folder, resume, log).exit_code)


def _supervise(
    process: Process,
    n_ranks: int,
    folder: Path,
    resume: Resume,
    log: LogLines,
    inherited: Sequence[int] = (),
) -> int:
    def command(attempt: int) -> list[str]:
        # An earlier attempt may have saved a checkpoint of this run.
        how = "auto" if attempt else resume
        watched = [sys.executable, "-P", "-m", "trainyard.launch.watched"]
        return [*watched, "trainyard.training.worker", str(folder), "--resume", how, "--log", log]

    return supervise(SupervisedJob(process, n_ranks, folder, command, inherited))


def wait_for_run_folder(
    folder: Path, run: Run, process: Process, timeout_seconds: float = WAIT_SECONDS
) -> None:
    """Waits until rank 0 has written this run to the folder, and checks that this rank can write.

    Raises:
        LaunchError: the run is missing, another run is there, or this rank cannot write there.
    """
    from trainyard.config.load import render_run

    path, wanted = folder / "run.toml", render_run(run)
    deadline = time.monotonic() + timeout_seconds
    while not (path.exists() and path.read_text(encoding="utf-8") == wanted):
        if time.monotonic() > deadline:
            found = "holds a different run from this rank's" if path.exists() else "is missing"
            raise LaunchError(
                f"rank {process.rank} of {process.n_ranks}: {path.resolve()} {found}, "
                f"{timeout_seconds:g} s after its start",
                "rank 0 writes it: see its output; all ranks need the same run file and overrides, "
                "and a folder that all machines see",
            )
        time.sleep(POLL_SECONDS)
    if not os.access(folder, os.W_OK):
        raise LaunchError(
            f"rank {process.rank} of {process.n_ranks}: {socket.gethostname()} cannot write to "
            f"{folder.resolve()}",
            "its file system is mounted read-only there, or the user lacks write permission",
        )


def _count_gpus() -> int:
    from trainyard.planning.hardware import list_gpus

    if not list_gpus():  # spares the slow import of torch
        return 0
    import torch

    return torch.cuda.device_count()
