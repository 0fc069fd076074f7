"""The training loop: step, log, evaluate, save, stop cleanly; top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainyard.errors import MachineError
from trainyard.train.checkpoints import save_state
from trainyard.train.guard import Guard
from trainyard.train.metrics import Metrics
from trainyard.train.observe import evaluate, sample
from trainyard.train.state import Parts, State
from trainyard.train.step import train_step

DONE = "done"


def train(
    parts: Parts, state: State, metrics: Metrics, guard: Guard, show: Callable[[int, str], None]
) -> str:
    """Trains from `state.step` to the end of the plan, or until there is a reason to stop.

    Args:
        parts: what training is made of.
        state: how far it is; moved on here.
        metrics: where results go.
        guard: knows when somebody asked to stop.
        show: called with (step, text) for every log line.

    Returns:
        why it ended: "done", or the guard's reason; the state is saved in either case.

    Raises:
        MachineError: too many steps in a row had gradients that were not finite.
    """
    run, plan = parts.run, parts.plan
    reason: str | None = None
    while state.step < plan.n_steps and reason is None:
        started = time.perf_counter()
        result = train_step(parts, state.step)
        n_sequences = parts.batches.batch_size(state.step)
        state.step += 1
        state.skipped.add(result.skipped)
        is_last = state.step == plan.n_steps
        log_now = is_last or every(state.step, run.log.interval)
        if log_now:
            stop_if_stuck(parts, state)
        metrics.add(result, n_sequences, time.perf_counter() - started)

        if log_now:
            show(state.step, metrics.write_steps(state, result))
        if is_last or every(state.step, run.evaluate.interval):
            show(state.step, evaluate(parts, state, metrics))
        if every(state.step, run.evaluate.sample_interval):
            show(state.step, sample(parts, state, metrics))
        reason = parts.replica.mesh.agree(guard.reason_to_stop())
        if is_last or reason or every(state.step, run.checkpoint.interval):
            save_state(parts, state)
    return reason or DONE


def every(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after this one; 0 is never."""
    return interval > 0 and step % interval == 0


def stop_if_stuck(parts: Parts, state: State) -> None:
    """Gives up when the guard's number of steps in a row had to be skipped.

    Raises:
        MachineError: says since when; nothing is saved, the newest checkpoint is from before.
    """
    in_a_row, limit = state.skipped.in_a_row, parts.run.guard.skipped_steps_limit
    if in_a_row >= limit:
        raise MachineError(
            f"the gradients of {in_a_row} steps in a row up to step {state.step} were not finite "
            f"(guard.skipped_steps_limit={limit})",
            "the newest checkpoint is from before; lower optimizer.learning_rate or check the data",
        )
