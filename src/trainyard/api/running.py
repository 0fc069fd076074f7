"""`trainyard.prepare` and `train`: the work of the commands of these names.

    python -m trainyard.api.running '{"run_file": "web.toml", "minutes": 10}'

trains in a process of its own, for `trainyard.train`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.api.planning import load_run
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
from trainyard.launch.heartbeat import end_with_parent
from trainyard.launch.local import wait_until
from trainyard.launch.lock import hold
from trainyard.launch.program import run_program
from trainyard.launch.restarts import note_refusal
from trainyard.launch.supervise import SupervisedJob, exit_code_below, supervise
from trainyard.training.run_folder import CONVERTED, RUNS, is_huggingface, refuse_moved_run
from trainyard.training.stop import INTERRUPTED, leave_when_told, refuse_stopped
from trainyard.units import format_figure, format_number, format_seconds

if TYPE_CHECKING:
    from trainyard.api.checkpoints import SavedCheckpoint
    from trainyard.config.run import Run
    from trainyard.training.metrics import LogLines
    from trainyard.training.run_folder import OpenRun, Resume

logger = logging.getLogger("trainyard")

WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Prepared:
    """Token files, and a run file to train on them."""

    run_file: Path
    prefixes: list[str]
    """Paths of the token files, without `.bin` or `.idx`."""
    n_documents: int
    n_tokens: int


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "",
    vocabulary_size: int = 0,
    workers: int = 1,
    overwrite: bool = False,
    **settings: Any,
) -> Prepared:
    """Tokenizes text into Megatron-LM token files, and writes a run file, `output`.toml.

    Args:
        inputs: text files, folders and globs.
        output: path prefix of the token files.
        tokenizer: "gpt2" or a tokenizer's folder; empty: train one.
        vocabulary_size: of the tokenizer to train; 0: depends on the size of the text.
        workers: processes, one core each.
        overwrite: replace token files made with other settings.
        settings: other fields of a data file, such as `json_key="body"` (docs/corpora.md).

    Raises:
        TrainyardError: an input or setting is wrong, or `output` exists with other settings.
    """
    from trainyard.config.corpus import check_complete, load_corpus, output_prefixes
    from trainyard.corpus.preparation import prepare as preparation
    from trainyard.corpus.preparation.run_file import write_run_file

    files = [inputs] if isinstance(inputs, str | Path) else inputs
    values = {"inputs": [str(file) for file in files], "output": str(output), **settings}
    corpus = load_corpus(None, {**values, "tokenizer": tokenizer})
    check_complete(corpus)
    or_fewer = not vocabulary_size
    if not tokenizer:
        corpus, vocabulary_size = preparation.choose_tokenizer(corpus, vocabulary_size)
    if vocabulary_size:
        preparation.train_on_inputs(corpus, vocabulary_size, overwrite=overwrite, or_fewer=or_fewer)
    sidecars = preparation.prepare(corpus, workers=workers, overwrite=overwrite)
    return Prepared(
        write_run_file(corpus, sidecars).path,
        output_prefixes(corpus, len(sidecars)),
        sum(sidecar.documents for sidecar in sidecars),
        sum(sidecar.tokens for sidecar in sidecars),
    )


def train(
    run: Run | str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    minutes: float | None = None,
    overwrite: bool = False,
) -> SavedCheckpoint:
    """Trains in `runs/NAME` as `trainyard train` does, in processes of their own.

    Resumes a run that has begun. Prints the log; Ctrl-C saves, then raises KeyboardInterrupt.

    Args:
        run: as for `load_run`.
        overrides: such as "train.length=500 steps".
        ranks: processes; absent: one per GPU, or those of the run's layout.
        minutes: shorten the run to what this machine trains in that time.
        overwrite: remove the run's checkpoints and metrics, and start over.

    Returns:
        The last checkpoint.

    Raises:
        TrainyardError: the run is wrong, or stopped before its end.
    """
    from trainyard.api.checkpoints import SavedCheckpoint
    from trainyard.config import load
    from trainyard.config.run import Run

    name = load_run(run, overrides).name
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        if isinstance(run, Run):
            file = Path(folder) / "run.toml"
            file.write_text(load.render_run(run), encoding="utf-8")
            run = file
        options = {"ranks": ranks, "minutes": minutes, "overwrite": overwrite}
        training = {"run_file": str(run), "overrides": list(overrides), **options}
        code, message = _run_program("trainyard.api.running", json.dumps(training))
    if code:
        error, _, hint = message.partition("\nhint: ")
        where = f"training of {name} ended with exit code {code}"
        raise UserError(error or where, hint or "train it again to continue")
    return SavedCheckpoint(RUNS / name)


def _run_program(*words: str) -> tuple[int, str]:
    """Runs a module in a child process and prints its output; returns its exit code and error."""
    command = [sys.executable, "-P", "-m", *words]
    output, error = subprocess.PIPE, subprocess.STDOUT
    is_interrupted = False
    lines: list[str] = []
    # A group of its own: Ctrl-C reaches it once, from here, whoever sent it.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=error, process_group=0
    ) as child:
        assert child.stdout is not None
        while child.returncode is None:
            try:
                for line in child.stdout:
                    text = line.decode(errors="replace")
                    sys.stdout.write(text)
                    lines = [text] if text.startswith("error: ") else [*lines[-20:], text]
                child.wait()
            except KeyboardInterrupt:
                is_interrupted = True
                child.send_signal(signal.SIGINT)
    if is_interrupted:
        raise KeyboardInterrupt
    end = "".join(lines).strip()
    return child.returncode, end.removeprefix("error: ") if end.startswith("error: ") else ""


@dataclass(frozen=True)
class Training:
    """What to train, and how."""

    run_file: str
    overrides: Sequence[str] = ()
    resume: Resume = "auto"
    ranks: int | None = None
    """None: one per GPU, or those of the run's layout."""
    minutes: float | None = None
    """Shorten the run and its schedule to about this time on this machine."""
    log: LogLines = "short"
    overwrite: bool = False
    """Remove the run's checkpoints and metrics; start over."""
    force: bool = False
    """Train even if memory or disk seem too small."""


def train_run(training: Training) -> int:
    """Trains in the folder runs/NAME; returns the exit code.

    Raises:
        UserError: the run is wrong, cannot be trained here, or another job trains it.
    """
    overrides, minutes = training.overrides, training.minutes
    if minutes is not None and any(text.startswith("train.length=") for text in overrides):
        raise ConfigError(
            "--minutes and train.length= both set the length of the run", "omit one of them"
        )
    for name, value, least in (("ranks", training.ranks, 1), ("minutes", minutes, 0.01)):
        if value is not None and value < least:
            raise ConfigError(f"{name}={value} is below {least}", f"{name}={least}, or more")
    process = read_process()
    for option in ("ranks", "minutes", "overwrite"):
        process.refuse_option(f"--{option}", getattr(training, option))
    if process.parent_pipe is not None:
        end_with_parent(process.parent_pipe)
    with leave_when_told():
        run = load_run(training.run_file, training.overrides)
        refuse_moved_run(training.run_file, run.name, training.overrides)
        folder = RUNS / run.name
        try:
            code = _train(training, process, *_open(training, process, run, folder))
        except UserError as error:
            note_refusal(folder, read_start(), error.exit_code)
            raise
    note_refusal(folder, read_start(), code)
    by_hand = process.n_ranks == 1 and read_start() is None
    return _end_by_hand(folder, code) if by_hand else code


def _open(
    training: Training, process: Process, run: Run, folder: Path
) -> tuple[OpenRun, Run | None]:
    """Opens the run for the ranks that train it, and as it was begun, if it was.

    What is wrong is refused before the slow import of torch.
    """
    from trainyard.data.patterns import find_token_files
    from trainyard.layout.resolve import resolve
    from trainyard.planning.room import refuse_without_room
    from trainyard.planning.shorten import describe_too_short
    from trainyard.training.run_folder import begun_run, check_entries, open_run

    check_entries(folder)
    starts_anew = training.resume == "never" or training.overwrite
    begun = None if starts_anew else begun_run(folder)
    ranks = process.n_ranks if process.n_ranks > 1 else training.ranks
    run = find_token_files(_follow_length(run, training, begun), begun)
    opened = open_run(folder, ranks, run)
    if process.rank == 0:
        for problem in describe_too_short(run, opened.plan):
            logger.warning("warning: %s", problem)
    require("torch")
    if process.rank == 0:
        opened.refuse_missing_inputs()
    if ranks is None and (n_gpus := _count_gpus()) > opened.plan.n_ranks:
        opened = replace(opened, plan=resolve(run, n_gpus))
    if process.n_ranks == 1 and 0 < (n_gpus := _count_gpus()) < opened.plan.n_ranks:
        raise MachineError(
            f"{opened.plan.n_ranks} ranks on this machine, where torch sees "
            + format_number(n_gpus, "GPU"),
            f"--ranks {n_gpus}; or, to train on the CPU, hide GPUs with CUDA_VISIBLE_DEVICES=",
        )
    if not training.force and process.local_rank == 0:
        n_local = process.n_local_ranks if process.n_ranks > 1 else opened.plan.n_ranks
        refuse_without_room(run, opened.plan, n_local, folder)
    return opened, begun


def _count_gpus() -> int:
    from trainyard.config.devices import list_gpus

    if not list_gpus():  # spares the slow import of torch
        return 0
    import torch

    return torch.cuda.device_count()


def _follow_length(run: Run, training: Training, begun: Run | None) -> Run:
    """Shortens the schedule of a file that Trainyard wrote with `train.length`, and says so."""
    from trainyard.planning.shorten import follow_length

    followed = follow_length(run, training.run_file, list(training.overrides), begun)
    if followed != run and read_process().rank == 0:
        warmup = f"schedule.warmup='{followed.schedule.warmup}'"
        logger.info(
            "schedule and intervals of %s follow train.length: %s", training.run_file, warmup
        )
    return followed


def _train(training: Training, process: Process, opened: OpenRun, begun: Run | None) -> int:
    """Trains all ranks of this machine, or the one of this process; returns the exit code."""
    from trainyard.layout.resolve import resolve
    from trainyard.training.run_folder import write_run_folder

    folder, n_ranks = opened.folder, opened.plan.n_ranks

    def command(attempt: int) -> list[str]:
        # An earlier attempt may have saved a checkpoint of this run.
        how = "auto" if attempt else training.resume
        watched = [sys.executable, "-P", "-m", "trainyard.launch.watched"]
        words = ["trainyard.training.worker", str(folder), "--resume", how, "--log", training.log]
        return watched + words

    job = SupervisedJob(process, n_ranks, folder, command)
    if process.rank > 0:
        wait_for_run_folder(folder, opened.run, process)
        return supervise(job)
    with hold(folder) as locks:
        if training.minutes is not None:
            run = _fit_into(training.minutes, opened.run, n_ranks, begun)
            opened = replace(opened, run=run, plan=resolve(run, n_ranks))
        if begun is None:
            convert_start(opened.run, folder)
        how = "overwrite" if training.overwrite else training.resume
        opened = write_run_folder(opened, "auto" if process.attempt else how)
        if n_ranks > 1:
            opened.files.take_manifest(None)  # its workers read their own
            return supervise(replace(job, inherited=locks))
        from trainyard.training.worker import run_worker

        faulthandler.enable(file=2)  # nobody else would name a crash
        return exit_code_below(process, run_worker(opened, training.resume, training.log).exit_code)


def _fit_into(minutes: float, run: Run, n_ranks: int, begun: Run | None) -> Run:
    """Shortens a run to fit into the minutes, or to the length it was started with."""
    from trainyard.checkpoint.format import list_checkpoints, step_of
    from trainyard.layout.resolve import resolve
    from trainyard.planning.shorten import shorten, with_lengths_of

    refuse_stopped(RUNS / run.name)
    if begun is not None:
        n_steps = resolve(begun).n_steps
        newest = next(iter(list_checkpoints(RUNS / run.name / "checkpoints")), None)
        if newest and step_of(newest) == n_steps:
            text = "is done at step %s; to train it longer, give it a train.length, not minutes"
        else:
            text = "has started before: it continues to step %s"
        logger.info(f"%s {text}", run.name, f"{n_steps:,}")
        return with_lengths_of(begun, run)
    from trainyard.bench.rounds import time_run

    logger.info("measuring this machine: a few seconds of training steps")
    step_seconds = time_run(run, n_ranks)
    fitted = shorten(run, max(1, int(60 * minutes / step_seconds)))
    n_steps = resolve(fitted).n_steps
    duration = format_seconds(n_steps * step_seconds)
    step = format_figure(1000 * step_seconds)
    logger.info("%s ms per step: %s steps, about %s", step, f"{n_steps:,}", duration)
    return fitted


def convert_start(run: Run, folder: Path) -> None:
    """Converts `train.start_from` into the run folder, if it is a Hugging Face folder.

    Raises:
        UserError: as `import_huggingface` and `refuse_foreign`.
    """
    from trainyard.export.foreign import refuse_foreign

    if is_huggingface(run.train.start_from):
        from trainyard.export.huggingface import import_huggingface

        shutil.rmtree(folder / CONVERTED, ignore_errors=True)
        import_huggingface(Path(run.train.start_from), folder / CONVERTED)
    elif run.train.start_from:
        refuse_foreign(Path(run.train.start_from))


def wait_for_run_folder(
    folder: Path, run: Run, process: Process, timeout_seconds: float = WAIT_SECONDS
) -> None:
    """Waits until rank 0 has written this run to the folder, and checks that this rank can write.

    Raises:
        LaunchError: the run is missing, another run is there, or this rank cannot write there.
    """
    from trainyard.config.load import render_run

    path, wanted = folder / "run.toml", render_run(run)
    me = f"rank {process.rank} of {process.n_ranks}"

    def is_there() -> bool:
        return path.exists() and path.read_text(encoding="utf-8") == wanted

    if not wait_until(is_there, timeout_seconds):
        problem = "holds a different run from this rank's" if path.exists() else "is missing"
        raise LaunchError(
            f"{me}: {path.resolve()} {problem}, {timeout_seconds:g} s after its start",
            "rank 0 writes it: see its output; all ranks need the same run file and overrides, "
            "and a folder that all machines see",
        )
    if not os.access(folder, os.W_OK):
        raise LaunchError(
            f"{me}: {socket.gethostname()} cannot write to {folder.resolve()}",
            "its file system is mounted read-only there, or the user lacks write permission",
        )


def _end_by_hand(folder: Path, code: int) -> int:
    """Returns the exit code for a person: 130 after Ctrl-C, which holds a job with 93."""
    if code == 0:
        name = shlex.quote(folder.name)
        verbs = (f"generate {name}", f"report {name}", f"export {name} --output {name}-gpt")
        logger.info("next: %s", " | ".join(f"trainyard {verb}" for verb in verbs))
    from trainyard.report.run_view import load_facts

    reason = (load_facts(folder / "outcome.json") or {}).get("reason")
    return EXIT_INTERRUPTED if code == EXIT_HOLD and reason == INTERRUPTED.reason else code


if __name__ == "__main__":
    run_program(lambda: train_run(Training(**json.loads(sys.argv[1]))))
