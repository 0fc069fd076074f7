"""The training loop: step, log, evaluate, save, stop."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainyard.checkpoint.background import AsyncCheckpointer
from trainyard.errors import GuardError
from trainyard.parallel.copies import differing_copies
from trainyard.train.checkpoints import load_newest, save_state
from trainyard.train.diagnosis import diagnose
from trainyard.train.metrics import Metrics
from trainyard.train.observe import evaluate, sample
from trainyard.train.saves import Saves
from trainyard.train.state import State, TrainContext
from trainyard.train.step import train_step
from trainyard.train.stop import DONE, Stop, StopReason

ROLLBACKS_LIMIT = 3

Show = Callable[[int, str], None]


def train(
    context: TrainContext,
    state: State,
    metrics: Metrics,
    stop: Stop,
    saver: AsyncCheckpointer,
    show: Show,
) -> tuple[StopReason, State]:
    """Trains from `state.step` to the end of the plan, or until asked to stop.

    Args:
        context: model, optimizer and data.
        state: the progress; updated here.
        metrics: receives results.
        stop: collects stop requests.
        saver: writes checkpoints.
        show: called with (step, text) for every log line, and with (step, "") after every step.

    Returns:
        why it ended, and the final, saved state.

    Raises:
        GuardError: training aborted; nothing more is saved.
        MachineError: the last checkpoint could not be written.
    """
    run, plan = context.run, context.plan
    saves = Saves(saver, metrics, show)
    ending: StopReason | None = None
    while state.step < plan.n_steps and ending is None:
        started = time.perf_counter()
        result = train_step(context, state)
        n_sequences = context.batches.batch_size(state.step)
        state.step += 1
        metrics.add(result, n_sequences, time.perf_counter() - started)
        show(state.step, "")

        request = context.model.mesh.agree(saves.stop_request(state.step) or stop.stop_request())
        is_last = state.step == plan.n_steps
        ending = StopReason.of(request)
        log_now = is_last or every(state.step, run.log.interval)
        save_now = is_last or request is not None or every(state.step, run.checkpoint.interval)
        if log_now:
            show(state.step, metrics.write_steps(state, result))
        if log_now or save_now:
            spikes = state.flush()
            stop_if_stuck(context, state)
            if spikes:
                show(state.step, describe_spikes(context, spikes))
                if run.guard.spikes == "rollback":
                    saves.pause(state.step)
                    state = roll_back(context, state, spikes[0], metrics, show)
                    continue
        ending = DONE if is_last else ending
        held_out_loss = None
        if is_last or every(state.step, run.evaluate.interval):
            held_out_loss = evaluate(context, state, metrics, show)
        samples = run.evaluate.sample_interval
        if every(state.step, samples) or (is_last and samples):
            show(state.step, sample(context, state, metrics))
        if every(state.step, run.guard.compare_interval):
            require_equal_copies(context, state)
        if save_now:
            context.heartbeat.enter("save", state.step)
            save_state(context, state, saver, held_out_loss)
    saves.finish(state.step)
    return ending or DONE, state


def every(step: int, interval: int) -> bool:
    """Returns whether an event of every `interval` steps is due after this one; 0 is never."""
    return interval > 0 and step % interval == 0


def stop_if_stuck(context: TrainContext, state: State) -> None:
    """Aborts when `guard.skipped_steps_limit` steps in a row were skipped.

    Raises:
        GuardError: with the step and its gradients; nothing is saved.
    """
    in_a_row, limit = state.skipped.in_a_row, context.run.guard.skipped_steps_limit
    if in_a_row >= limit:
        raise GuardError(
            f"{in_a_row} steps in a row up to step {state.step} were skipped "
            f"(guard.skipped_steps_limit={limit})\n{diagnose(context, state)}",
            "these steps changed no weights; lower optimizer.learning_rate or check the data",
        )


def require_equal_copies(context: TrainContext, state: State) -> None:
    """Compares weights that several ranks hold copies of.

    Raises:
        GuardError: names ranks and parameters; nothing is saved.
    """
    problems = differing_copies(context.model)
    if problems:
        interval = context.run.guard.compare_interval
        raise GuardError(
            f"after step {state.step} copies of the same weights differ between ranks; suspect a "
            "faulty device or memory:\n" + "\n".join(f"  {each}" for each in problems),
            "exclude that machine, and remove the checkpoints after step "
            f"{max(0, state.step - interval)}, the last comparison that passed",
        )


def describe_spikes(context: TrainContext, spikes: list[int]) -> str:
    """Describes which steps spiked, and the action taken."""
    guard = context.run.guard
    steps = ", ".join(str(step + 1) for step in spikes[:10]) + (", ..." if spikes[10:] else "")
    done = {"skip": "skipped", "rollback": "rolling back"}.get(guard.spikes, "no action")
    return (
        f"warning: loss or gradient norm of step {steps} is more than {guard.spike_deviations:g} "
        f"standard deviations above the {guard.spike_window} steps before: {done} "
        f"(guard.spikes={guard.spikes})"
    )


def roll_back(
    context: TrainContext, state: State, spike: int, metrics: Metrics, show: Show
) -> State:
    """Rolls back to the newest checkpoint before a spike, and skips the data since.

    Args:
        context: of the run; weights and optimizer are reloaded.
        state: the current progress.
        spike: the step of the spike, counted from 0.
        metrics: receives an event.
        show: receives a line.

    Raises:
        CheckpointError: there is no checkpoint before it.
        GuardError: too many rollbacks to this checkpoint.
    """
    context.heartbeat.enter("load", state.step)
    before = load_newest(context, lambda step: step <= spike)
    n_skipped = context.batches.consumed(state.step) - context.batches.consumed(before.step)
    before.skip_data(state, n_skipped, f"spike at step {spike + 1}")
    if before.n_rollbacks_here > ROLLBACKS_LIMIT:
        raise GuardError(
            f"the spike at step {spike + 1} needs rollback {before.n_rollbacks_here} to "
            f"step {before.step}; the limit is {ROLLBACKS_LIMIT}",
            "lower optimizer.learning_rate, or set guard.spikes=warn",
        )
    metrics.write(
        "rollback", {"step": before.step, "from_step": state.step, "skipped_sequences": n_skipped}
    )
    show(before.step, f"rolled back to step {before.step}; skipping {n_skipped} sequences")
    return before
