"""Trains on a built context until the end or a stop request, and records what came of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainyard.errors import SPACE, GuardError, MachineError
from trainyard.files import publish_text
from trainyard.launch.environment import seconds_left
from trainyard.log import show_progress
from trainyard.parallel.mesh import device_name
from trainyard.training.checkpoints import build_saver
from trainyard.training.loop import Show, train
from trainyard.training.metrics import LogLines, Metrics
from trainyard.training.run_folder import checkpoint_folder
from trainyard.training.state import State, TrainContext
from trainyard.training.stop import LostFolderError, Stop, StopReason
from trainyard.units import format_large

logger = logging.getLogger("trainyard")

OUTCOME = "outcome.json"


def train_to_the_end(context: TrainContext, state: State, log: LogLines) -> StopReason:
    """Trains from `state`; the first rank records metrics, and how training ended.

    Args:
        context: of the run.
        state: its progress, as loaded.
        log: "short" log lines have the essential metrics, "full" ones all.

    Raises:
        GuardError: training aborted.
        MachineError: the run folder cannot be written.
    """
    folder, run, device = context.folder, context.run, context.device
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
