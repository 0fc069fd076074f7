"""One training process: reads the run folder, builds the context, trains, reports the outcome.

    python -m trainyard.training.worker runs/my-run --resume auto

Everything comes from `run.toml` in the folder, so nothing else must match across ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args

import torch

from trainyard.checkpoint.background import probe
from trainyard.checkpoint.format import list_checkpoints
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.data.loader import (
    Loader,
    data_fingerprint,
    describe_data,
)
from trainyard.data.tokenizer import Tokenizer, tokenizer_name
from trainyard.data.vocabulary import load_vocabulary
from trainyard.errors import (
    SPACE,
    ConfigError,
    GuardError,
    MachineError,
    UserError,
)
from trainyard.files import publish_text
from trainyard.launch.environment import (
    hide_secrets,
    read_process,
    refuse_missing_devices,
    seconds_left,
)
from trainyard.launch.heartbeat import Heartbeat
from trainyard.log import build_logger, show_progress
from trainyard.model.attention import CUDNN
from trainyard.model.compiled import Trial, refuse_wrong_once
from trainyard.optim.optimizer import build_optimizer
from trainyard.parallel.mesh import (
    Mesh,
    build_mesh,
    choose_device,
    device_name,
    keep_freed_memory,
    name_device_errors,
)
from trainyard.parallel.model import ParallelModel, choose_attention, compiles_blocks
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.planning.batches import BatchSchedule
from trainyard.planning.resolve import Plan, resolve
from trainyard.planning.saving import checkpoint_bytes
from trainyard.precision.block_scaled import torch_dtype
from trainyard.precision.float8 import refuse_device
from trainyard.precision.policy import warn_of_slow_precision
from trainyard.training.checkpoints import build_saver, load_state
from trainyard.training.inputs import build_shared_orders, check_vocabularies, read_unread
from trainyard.training.loop import Show, train
from trainyard.training.metrics import LogLines, Metrics
from trainyard.training.run_folder import (
    TOKENIZER_FOLDER,
    Resume,
    checkpoint_folder,
    find_checkpoint,
    refuse_what_is_not_built,
)
from trainyard.training.state import State, TrainContext
from trainyard.training.stop import LostFolderError, Stop, StopReason
from trainyard.units import format_large

logger = logging.getLogger("trainyard")

OUTCOME = "outcome.json"


def run_worker(folder: Path, resume: Resume = "auto", log: LogLines = "short") -> StopReason:
    """Trains the run of a folder from its newest checkpoint, or from the beginning.

    Args:
        folder: holds run.toml; all output goes here.
        resume: "auto" resumes if there is a checkpoint; "must" requires one, "never" forbids one.
        log: "short" log lines have the essential metrics, "full" ones all.

    Returns:
        why training ended, `DONE` at the end of the plan; the first rank writes it to outcome.json.

    Raises:
        UserError: the run, its data or its checkpoint is unusable.
        GuardError: training aborted.
    """
    run_text = (folder / "run.toml").read_text(encoding="utf-8")
    run = load_run(str(folder / "run.toml")).run
    process = read_process()
    heartbeat = Heartbeat(
        process.heartbeat, 60 * run.guard.step_timeout_minutes, 60 * run.guard.slow_timeout_minutes
    )
    heartbeat.enter("start", 0)
    if process.rank > 0:
        logger.setLevel(logging.ERROR)  # rank 0 logs for all
    plan = resolve(run, process.n_ranks)
    refuse_what_is_not_built(run)
    refuse_missing_devices(torch.cuda.device_count())
    device = choose_device(process, run)
    refuse_device(run, device)
    n_bytes = checkpoint_bytes(run, plan.n_parameters)

    def check_first_rank() -> None:
        """Raises an error if `resume` does not fit, or a checkpoint or compiled block is wrong."""
        probe(checkpoint_folder(folder), n_bytes)
        find_checkpoint(folder, resume)
        if compiles_blocks(run, device):
            dtype = torch_dtype(run.precision.formats.compute)
            takes_cudnn = choose_attention(run, dtype, device) == CUDNN
            trial = Trial(run.model, dtype, run.parallel.recompute, device, takes_cudnn)
            refuse_wrong_once(trial, Path(run.data.cache_folder))

    def facts() -> dict[str, str]:
        if process.rank == 0:  # here, so that the others hear of it
            check_first_rank()
        newest = next(iter(list_checkpoints(checkpoint_folder(folder))), None)
        tokenizer = [path.read_bytes() for path in (folder / TOKENIZER_FOLDER).glob("*.json")]
        return gather_facts(run_text, describe_data(run)) | {
            "checkpoint": newest.name if newest else "none",
            "tokenizer": hashlib.sha256(b"".join(tokenizer)).hexdigest(),
        }

    if process.n_ranks == 1:
        check_first_rank()
    with start_ranks(process, device, facts), name_device_errors(run, plan, device):
        warn_of_slow_precision(run, device)
        mesh = build_mesh(plan.topology, process.rank, device)
        read_unread(run, mesh, heartbeat, keeps=process.local_rank == 0)
        return _train_on(build_context(folder, run, plan, mesh, heartbeat), log)


def _train_on(context: TrainContext, log: LogLines) -> StopReason:
    folder, run = context.folder, context.run
    context.heartbeat.enter("load", 0)
    state = load_state(context)
    device = context.device
    try:
        if context.is_first_rank:
            _write_facts(context)
        metrics = Metrics(context, log)
    except OSError as error:
        raise MachineError(
            f"cannot write to {folder}: {error}",
            f"{SPACE}, or make it writable",
        ) from error
    start = {"step": state.step, "resumed": state.step > 0, "device": device_name(device)}
    metrics.write("start", start | {"attention": context.attention_kernel})
    stop_folder = folder if context.is_first_rank else None
    stop = Stop(stop_folder, run.train.stop_after_minutes, seconds_left())
    saver = build_saver(context)
    try:
        with stop.catch_signals(), show_training(context, state.step) as show:
            show(state.step, _describe(context, state))
            ending, state = train(context, state, metrics, stop, saver, show)
            context.heartbeat.enter("end", state.step)
            metrics.write("end", {"step": state.step, "reason": ending.reason})
            show(
                state.step,
                f"{ending.reason}: saved step {state.step} in {checkpoint_folder(folder)}",
            )
    except LostFolderError:
        raise
    except GuardError as error:
        with suppress(MachineError):
            saver.wait()  # for the previous checkpoint
        with suppress(MachineError):  # a disk that fails too
            _write_outcome(context, StopReason(error.problem, error.exit_code), state.step)
        raise
    finally:
        metrics.close()
    _write_outcome(context, ending, state.step)
    return ending


def build_context(
    folder: Path, run: Run, plan: Plan, mesh: Mesh, heartbeat: Heartbeat
) -> TrainContext:
    """Builds model, optimizer and data; checks that data, tokenizer and model belong together."""
    tokenizer = None
    if run.tokenizer.path:
        vocabulary = load_vocabulary(folder / TOKENIZER_FOLDER)
        tokenizer = Tokenizer(vocabulary, tokenizer_name(run.tokenizer.path))
    check_vocabularies(run, tokenizer)
    batches = BatchSchedule(run)
    orders = build_shared_orders(run, plan, mesh)
    if orders["train"] is None:
        raise ConfigError(
            f"data.split={run.data.split!r} leaves no sequences for training",
            "set its first share above 0",
        )
    if mesh.device.type == "cpu":
        keep_freed_memory()
    is_filled = bool(list_checkpoints(checkpoint_folder(folder)) or run.train.start_from)
    parallel_model = ParallelModel(run, plan, mesh, is_filled=is_filled)
    return TrainContext(
        folder=folder,
        run=run,
        plan=plan,
        batches=batches,
        model=parallel_model,
        optimizer=build_optimizer(parallel_model, run),
        train_data=Loader(
            orders["train"],
            batches,
            run.model.vocabulary_size,
            mesh.data_rank_and_size,
            pin_memory=mesh.device.type == "cuda",
        ),
        valid_order=orders["valid"],
        test_order=orders["test"],
        tokenizer=tokenizer,
        data_fingerprint=data_fingerprint(run),
        heartbeat=heartbeat,
    )


@contextmanager
def show_training(context: TrainContext, first_step: int) -> Iterator[Show]:
    """Yields a function that logs a line of training, and moves a progress bar on a terminal.

    Only the first rank shows anything.
    """
    if not context.is_first_rank:
        yield lambda _step, _text: None
        return
    n_steps = context.plan.n_steps
    with show_progress("training", plain_lines=False) as update:

        def show(step: int, text: str) -> None:
            if text:
                logger.info("%s", text)
            update(step, n_steps, f"step {step:,} of {n_steps:,}")

        show(first_step, "")
        yield show


def _write_facts(context: TrainContext) -> None:
    folder = context.folder
    (folder / OUTCOME).unlink(missing_ok=True)  # of an earlier start
    for name, facts in (("plan", context.plan.as_json()), ("versions", context.versions)):
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _write_outcome(context: TrainContext, ending: StopReason, step: int) -> None:
    """Records how training ended, for launchers whose exit code does not show it."""
    if context.is_first_rank:
        facts = {"reason": ending.reason, "exit_code": ending.exit_code, "step": step}
        publish_text(context.folder / OUTCOME, json.dumps(facts, indent=2) + "\n")


def _describe(context: TrainContext, state: State) -> str:
    run, plan = context.run, context.plan
    start = f"resumes at step {state.step}" if state.step else "starts"
    return (
        f"{run.name} {start}: {plan.n_parameters:,} parameters, {plan.n_steps} steps, "
        f"{format_large(plan.n_tokens)} tokens, {run.precision.kind} on {context.device}"
    )


def main() -> None:
    """Runs one worker from the command line, as a launcher does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", choices=get_args(Resume), default="auto")
    parser.add_argument("--log", choices=get_args(LogLines), default="short")
    arguments = parser.parse_args()
    build_logger(hide_secrets)
    try:
        code = run_worker(arguments.folder, arguments.resume, arguments.log).exit_code
    except UserError as error:
        logger.error("error: %s", error)
        code = error.exit_code
    except Exception:
        logger.error("%s", traceback.format_exc())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
