"""The training loop: step, log, evaluate, save, stop; and the record of how it ended."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from trainyard.checkpoint.background import AsyncCheckpointer
from trainyard.config.run import Run
from trainyard.data.loader import held_out_batches
from trainyard.data.order import Split
from trainyard.errors import SPACE, GuardError, MachineError
from trainyard.evaluation.generate import Sampling, generate
from trainyard.evaluation.loss import held_out_loss, pad_batch
from trainyard.files import publish_text
from trainyard.launch.environment import seconds_left
from trainyard.log import show_progress
from trainyard.parallel.mesh import StopVote, device_name
from trainyard.training.checkpoints import Saves, build_saver
from trainyard.training.guard import describe_spikes, require_equal_copies, roll_back, stop_if_stuck
from trainyard.training.metrics import LogLines, Metrics
from trainyard.training.run_folder import checkpoint_folder
from trainyard.training.state import State, TrainContext
from trainyard.training.step import freeze_collector, train_step, unfreeze_collector
from trainyard.training.stop import DONE, LostFolderError, Stop, StopReason
from trainyard.units import format_large

logger = logging.getLogger("trainyard")

OUTCOME = "outcome.json"
SAMPLING = Sampling(temperature=0.6, top_k=50, top_p=1.0, seed=0)

Show = Callable[[int, str], None]


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
    saver = build_saver(context)
    stop_folder, minutes = folder if context.is_first_rank else None, run.train.stop_after_minutes
    stop = Stop(
        stop_folder, minutes, seconds_left(), lambda: saver.last.seconds if saver.last else 0
    )
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


@unfreeze_collector()
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
    saves, vote = Saves(context, saver, metrics, show), StopVote(context.model.mesh)
    ending: StopReason | None = None
    request_before_rollback: str | None = None
    first_step = state.step
    while state.step < plan.n_steps and ending is None:
        with metrics.timing():
            result = train_step(context, state)
        n_sequences = context.batches.batch_size(state.step)
        state.step += 1
        metrics.add(result, n_sequences)
        show(state.step, "")
        freeze_collector(state.step - first_step)

        # A StopReason as text; or SAVE: save and continue; or None.
        request = request_before_rollback or saves.report_finished(state.step)
        request = vote.cast(request or stop.stop_request() or saves.timed_request())
        request_before_rollback = None
        is_last = state.step == plan.n_steps
        ending = StopReason.of(request)
        log_now = is_last or every(state.step, run.log.interval)
        save_now = is_last or request is not None or is_save_due(run, state.step)
        if log_now:
            show(state.step, metrics.write_steps(state, result))
        if log_now or save_now:
            spikes = state.read_outcomes()
            stop_if_stuck(context, state)
            if spikes:
                show(state.step, describe_spikes(context, spikes))
                if run.guard.spikes == "rollback":
                    saves.pause(state.step)
                    state = roll_back(context, state, spikes[0], metrics, show)
                    # Stop after one more step, so that its checkpoint records the skipped data.
                    request_before_rollback, ending = request, None
                    continue
        ending = DONE if is_last else ending
        held_out_loss = None
        if is_last or every(state.step, run.evaluate.interval):
            held_out_loss = evaluate(context, state, metrics, show)
        sample_interval = run.evaluate.sample_interval
        if every(state.step, sample_interval) or (is_last and sample_interval):
            show(state.step, sample(context, state, metrics))
        if every(state.step, run.guard.compare_interval):
            require_equal_copies(context, state)
        if save_now:
            context.heartbeat.enter("save", state.step)
            saves.save(state, held_out_loss)
    saves.finish(state.step)
    return ending or DONE, state


def every(step: int, interval: int) -> bool:
    """Returns whether an event of every `interval` steps is due after this one; 0 is never."""
    return interval > 0 and step % interval == 0


def is_save_due(run: Run, step: int) -> bool:
    """Returns whether to save after this step, at whatever time."""
    saving = run.checkpoint
    steps = saving.interval if isinstance(saving.interval, int) else 0
    of_best = run.evaluate.interval if saving.keep_best else 0
    return any(every(step, each) for each in (steps, saving.keep_every, of_best))


def evaluate(context: TrainContext, state: State, metrics: Metrics, show: Show) -> float | None:
    """Measures and shows the held-out loss, and at the end that of the test split, if any."""
    held_out_loss = _evaluate(context, state, metrics, show, "valid")
    if state.step == context.plan.n_steps and context.test_order is not None:
        _evaluate(context, state, metrics, show, "test")
    return held_out_loss


def _evaluate(
    context: TrainContext, state: State, metrics: Metrics, show: Show, split: Split
) -> float | None:
    """Measures the loss on a fixed set of sequences."""
    context.heartbeat.enter("evaluate", state.step)
    vocabulary_size, size = context.run.model.vocabulary_size, context.run.train.global_batch_size
    order = context.test_order if split == "test" else context.valid_order
    if order is None:
        is_off = context.run.evaluate.batches == 0
        why = "evaluate.batches=0" if is_off else f"the {split} split is empty"
        show(state.step, f"no evaluation: {why}")
        return None
    # A blend without weights may be shorter; ranks split whole batches.
    n_sequences = min(context.run.evaluate.batches * size, len(order))
    found_batches = held_out_batches(order, n_sequences, size, vocabulary_size)
    batches = (pad_batch(*batch, size) for batch in found_batches)
    loss_of = context.model.held_out_loss
    found = held_out_loss(loss_of, batches, vocabulary_size, context.tokenizer)
    consumed = context.batches.consumed(state.step) * context.run.model.sequence_length
    values = {"step": state.step, "tokens": consumed, "split": split, **found.as_dict()}
    metrics.write("evaluate", values)
    name = "test" if split == "test" else "held-out"
    line = f"step {state.step}: {name} loss {found.mean_loss:.4f}"
    line += f" | perplexity {found.perplexity:.2f}"
    bits = found.bits_per_byte
    show(state.step, line if bits is None else f"{line} | {bits:.3f} bits per byte")
    return found.mean_loss


def sample(context: TrainContext, state: State, metrics: Metrics) -> str:
    """Continues each prompt; returns the texts."""
    context.heartbeat.enter("evaluate", state.step)
    model = context.model.whole_model
    if context.tokenizer is None:
        return "no samples: tokenizer.path is empty"
    if model is None:
        return "no samples: the model is sharded; run trainyard generate on a checkpoint"
    texts = []
    sampling = replace(SAMPLING, vocabulary_size=context.tokenizer.vocabulary_size)
    for prompt in context.run.evaluate.sample_prompts:
        ids = context.tokenizer.encode(prompt)
        n_tokens, end = context.run.evaluate.sample_tokens, context.tokenizer.eod_id
        (new,) = generate(model, [ids], n_tokens, sampling, end)
        text = context.tokenizer.decode(new)
        metrics.write("sample", {"step": state.step, "prompt": prompt, "text": text})
        texts.append(f"sample of {prompt!r}: {text}")
    return "\n".join(texts)


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
