"""Saves and restores the training state, and reports saves that finish during training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from trainyard.checkpoint.background import AsyncCheckpointer, Retention, SaveTimes
from trainyard.checkpoint.format import (
    Facts,
    Manifest,
    list_checkpoints,
    load_manifest,
    manifest_sha256,
    read_manifest,
    step_of,
)
from trainyard.checkpoint.load import load_into
from trainyard.checkpoint.resume import changes_data, check_resumable
from trainyard.checkpoint.save import ALONE, SavingRank
from trainyard.config.precisions import EXPONENTS, SCALED_COLUMNS
from trainyard.config.rules import change
from trainyard.data.loader import keeps_passes
from trainyard.errors import EXIT_HOLD, CheckpointError, MachineError
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import learning_rate, resolve
from trainyard.layout.sizes import checkpoint_bytes, rank_bytes
from trainyard.parallel.placement import Placement, local_part
from trainyard.training.metrics import Metrics
from trainyard.training.run_folder import ANCESTRY, RunFiles, ancestry, checkpoint_folder
from trainyard.training.state import State, TrainContext
from trainyard.training.stop import SAVE, StopReason
from trainyard.units import format_bytes

logger = logging.getLogger("trainyard")

WEIGHTS = "model."
OPTIMIZER = "optimizer."
FAILURES_LIMIT = 3


def build_saver(context: TrainContext) -> AsyncCheckpointer:
    """Builds the checkpointer of a run."""
    mesh, settings = context.model.mesh, context.run.checkpoint
    ranks = ALONE
    if mesh.topology.n_ranks > 1:
        agree = partial(mesh.agree, group=mesh.saving)
        ranks = SavingRank(mesh.rank, mesh.topology.n_ranks, agree)
    keep = Retention(settings.keep_last, settings.keep_every, settings.keep_best)
    folder = checkpoint_folder(context.folder)
    vocabulary = context.tokenizer.vocabulary if context.tokenizer else None
    saver = AsyncCheckpointer(
        folder, ranks, keep, background=settings.background, vocabulary=vocabulary
    )
    saver.reserve(rank_bytes(context.run, context.plan, mesh.rank), context.device)
    return saver


def save_state(
    context: TrainContext, state: State, saver: AsyncCheckpointer, held_out_loss: float | None
) -> None:
    """Saves weights, optimizer and progress; from a copy in the background, if so configured.

    Args:
        context: of the run.
        state: its progress.
        saver: writes it, and reports failures.
        held_out_loss: of this step; checkpoints are ranked by it.
    """
    consumed = context.batches.consumed(state.step)
    training = state.as_json()
    if held_out_loss is not None:
        training["held_out_loss"] = held_out_loss
    facts = Facts(
        step=state.step,
        consumed_sequences=consumed,
        consumed_tokens=consumed * context.run.model.sequence_length,
        run=context.run.model_dump(mode="json"),
        plan=context.plan.as_json(),
        versions=context.versions,
        data_fingerprint=context.data_fingerprint,
        training=training,
    )
    tensors, placements = _named_parts(context, to_write=True)
    saver.save(facts, tensors, placements, checkpoint_bytes(context.run, context.plan.n_parameters))


def load_state(context: TrainContext, files: RunFiles | None = None) -> State:
    """Loads the newest checkpoint of the run folder; without one, starts at step 0.

    It then takes the weights of `train.start_from`, if any.

    Args:
        context: of the run.
        files: may have read the newest manifest already.

    Raises:
        CheckpointError: all are damaged, or it belongs to another run or other data.
    """
    there = list_checkpoints(checkpoint_folder(context.folder))
    if not there and context.run.train.start_from:
        return _load_start(context)
    if there or context.model.is_filled:  # without weights of its own, it never starts
        return load_newest(context, lambda _step: True, files)
    return State.at_start(context)


def _load_start(context: TrainContext) -> State:
    """Takes weights, and optimizer state if the run says so, from the last of its ancestors."""
    ancestors, mesh = ancestry(context.folder), context.model.mesh
    problem, state = None, State.at_start(context)
    try:
        path = Path(ancestors[-1]["path"])
        manifest = _read_manifest(context, path)
        if manifest_sha256(path) != ancestors[-1]["sha256"]:
            raise CheckpointError(f"{path} has changed since {context.folder / ANCESTRY}")
        parent = State.from_json(context, manifest.step, manifest.training)
        saved: dict[str, JsonValue] = {}
        has_state = context.run.train.start_with != "weights"
        if has_state:
            saved["updates_before"] = parent.updates
            saved["loss_scale"] = manifest.training.get("loss_scale")
        state = State.from_json(context, 0, saved)
        state.ancestors = ancestors
        _fill(context, path, manifest, parent.updates if has_state else None)
        _say_start(context, manifest, parent, path)
    except CheckpointError as error:
        problem = error.problem
    problem = mesh.agree(problem)
    if problem is not None:
        raise CheckpointError(problem, "start from another checkpoint: train.start_from")
    return state


def _say_start(context: TrainContext, manifest: Manifest, parent: State, path: Path) -> None:
    run, theirs = context.run, manifest.build_run()
    taken = run.train.start_with.replace("_", " ")
    logger.info("starts from %s of step %s in %s", taken, f"{manifest.step:,}", path.parent)
    read = BatchSchedule(theirs).position(manifest.step) + parent.data_offset
    if context.data_fingerprint == manifest.data_fingerprint and not run.data.skip.amount:
        logger.info(
            'it reads the same data from the beginning; data.skip="%s sequences" continues after '
            "those that %s has read",
            *(read, theirs.name),
        )
    theirs_tokenizer = manifest.tokenizer.fingerprint if manifest.tokenizer else ""
    ours = context.tokenizer.fingerprint if context.tokenizer else ""
    if theirs_tokenizer and ours and theirs_tokenizer != ours:
        logger.warning("the tokenizer is not the one of %s, which its weights learned", path)


def load_newest(
    context: TrainContext, is_wanted: Callable[[int], bool], files: RunFiles | None = None
) -> State:
    """Loads the newest intact checkpoint whose step is wanted.

    The first rank chooses, since others may see an older state of the folder. Every rank reads what
    it needs; if one finds damage, all try the checkpoint before.

    Raises:
        CheckpointError: none is left, or it belongs to another run or other data.
    """
    mesh, folder = context.model.mesh, checkpoint_folder(context.folder)
    candidates = (path for path in list_checkpoints(folder) if is_wanted(step_of(path) or 0))
    problem: str | None = None
    while True:
        chosen = next(candidates, None) if context.is_first_rank else None
        name = mesh.agree((chosen.name if chosen else "") if context.is_first_rank else None)
        if not name:
            break
        manifest = files.take_manifest(folder / name) if files else None
        problem, state = _try(context, folder / name, manifest)
        problem = mesh.agree(problem)
        if problem is None and state is not None:
            return state
        logger.warning("skipping %s, trying the checkpoint before it: %s", name, problem)
    raise CheckpointError(
        f"no checkpoint in {folder} can be used; last problem: {problem or 'none is old enough'}",
        "find the damage with trainyard check checkpoint, then restore the files from a copy",
    )


def _try(
    context: TrainContext, path: Path, manifest: Manifest | None
) -> tuple[str | None, State | None]:
    """Loads a checkpoint, whose manifest may have been read; returns its problem, or the state."""
    try:
        manifest = manifest or _read_manifest(context, path)
    except CheckpointError as error:
        return error.problem, None
    tokenizer = context.tokenizer.fingerprint if context.tokenizer else ""
    n_steps, fingerprint = context.plan.n_steps, context.data_fingerprint
    changes = check_resumable(manifest, context.run, n_steps, fingerprint, tokenizer)
    for each in changes:
        logger.info("changed since the checkpoint: %s", each.values)
        if each.field == "train.length" and manifest.step > 0 and context.is_first_rank:
            logger.info("%s", describe_new_length(context, manifest))
    code, commit = (manifest.versions.get(name, "unknown") for name in ("code", "commit"))
    if code != context.versions["code"]:
        logger.info("the checkpoint was written by other code: %s, commit %s", code, commit)
    if changes and manifest.step > 0 and not changes_data(manifest, context.run):
        earlier = resolve(manifest.build_run())
        if not keeps_passes(context.run, "valid", context.valid_order, earlier):
            logger.info("from here on, the held-out loss uses other sequences")
    state = State.from_json(context, manifest.step, manifest.training)
    if changes_data(manifest, context.run):
        state.data_offset = 0
    try:
        _fill(context, path, manifest, state.updates if manifest.step > 0 else None)
    except CheckpointError as error:
        return error.problem, None
    return None, state


def _read_manifest(context: TrainContext, path: Path) -> Manifest:
    """Reads a manifest; only the first rank checks that all files are there, with their sizes.

    Other ranks find what is wrong with the files that they read.
    """
    return read_manifest(path) if context.is_first_rank else load_manifest(path)


def describe_new_length(context: TrainContext, manifest: Manifest) -> str:
    """Describes what another length than the checkpoint's does to learning rate and data."""
    run, plan, step = context.run, context.plan, manifest.step
    rates = [learning_rate(run, plan, context.batches.consumed(n)) for n in (step, plan.n_steps)]
    earlier = manifest.build_run()
    text = "the same" if earlier.schedule == run.schedule else "new"
    text = f"the schedule is {text}: learning rate {rates[0]:.3g} now, {rates[1]:.3g} at the end"
    if changes_data(manifest, run):
        return f"{text}; the data is new from here, from sequence {context.batches.position(step)}"
    saved = change(run, {"train.length": earlier.train.length})
    before = resolve(saved, plan.n_ranks)
    if keeps_passes(run, "train", context.train_data.order, before):
        text += "; the order of the training data is the same"
    else:
        text += "; the training data needs more or fewer passes, so its order is new from here, as "
        text += "in Megatron-LM: some sequences repeat early, others come late"
    return text


def _fill(context: TrainContext, path: Path, manifest: Manifest, n_updates: int | None) -> None:
    """Copies a checkpoint's tensors into model and optimizer; into the model only without updates.

    Args:
        context: of the run.
        path: of the checkpoint.
        manifest: of the checkpoint.
        n_updates: that its optimizer state has had; None takes weights alone.
    """
    has_state = n_updates is not None
    if has_state:
        context.optimizer.prepare_state(n_updates)
    tensors, placements = _named_parts(context, to_write=False)
    wanted = {name: t for name, t in tensors.items() if has_state or name.startswith(WEIGHTS)}
    load_into(path, wanted, context.run.model.vocabulary_size, placements, manifest)
    if not has_state:
        context.optimizer.prepare_state(None)


def _named_parts(
    context: TrainContext, *, to_write: bool
) -> tuple[dict[str, Tensor], dict[str, Placement]]:
    """Names this rank's shards of weights and moments, with their places in the whole.

    Args:
        context: of the run.
        to_write: skip what another rank writes.
    """
    tensors: dict[str, Tensor] = {}
    placements: dict[str, Placement] = {}
    for local in context.model.saved_tensors:
        if to_write and not context.model.is_writer(local):
            continue
        placement = local.placement
        tensors[f"{WEIGHTS}{local.name}"] = local_part(local.parameter)
        placements[f"{WEIGHTS}{local.name}"] = placement
        for what, value in context.optimizer.state_of(local).items():
            name = f"{OPTIMIZER}{local.name}.{what}"
            tensors[name] = value
            placements[name] = _of_scales(placement) if what.endswith(EXPONENTS) else placement
    return tensors, placements


def _of_scales(of_matrix: Placement) -> Placement:
    """Returns the place of a matrix's exponents, each shared by a block of columns."""
    shapes = (of_matrix.shape, of_matrix.offsets, of_matrix.local_shape)
    return Placement(*((rows, columns // SCALED_COLUMNS) for rows, columns in shapes))


class Saves:
    """Saves, reports finished saves, and stops training after repeated failures.

    Args:
        context: of the run.
        saver: writes checkpoints.
        metrics: receives an event for each save.
        show: called with (step, text).
        clock: in seconds; that of the first rank decides for all when it is time to save.
    """

    def __init__(
        self,
        context: TrainContext,
        saver: AsyncCheckpointer,
        metrics: Metrics,
        show: Callable[[int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        interval = context.run.checkpoint.interval
        self._seconds = math.inf
        if context.is_first_rank and not isinstance(interval, int):
            self._seconds = interval.seconds
        self._clock, self._started = clock, clock()
        self._context, self._saver = context, saver
        self._metrics = metrics
        self._show = show
        self._shown: SaveTimes | None = None
        self._n_failures = 0

    def save(self, state: State, held_out_loss: float | None) -> None:
        """Saves as `save_state`; the next save by time is an interval after this one."""
        self._started = self._clock()
        save_state(self._context, state, self._saver, held_out_loss)

    def timed_request(self) -> str | None:
        """Returns SAVE once the interval since the last save has passed, on the first rank."""
        return SAVE if self._clock() - self._started >= self._seconds else None

    def report_finished(self, step: int) -> str | None:
        """Reports saves that finished or failed; after many failures, returns a request to stop."""
        times = self._saver.last
        if times is not None and times is not self._shown:
            self._shown = times
            self._n_failures = 0
            seconds = {"stall_seconds": times.stall_seconds, "seconds": times.seconds}
            self._metrics.write("save", {"step": times.step, **seconds, "bytes": times.n_bytes})
            self._show(
                step,
                f"saved step {times.step}: {format_bytes(times.n_bytes)} in "
                f"{times.seconds:.1f} s, training stalled for {times.stall_seconds:.2f} s",
            )
        failure = self._saver.take_failure()
        if failure is None:
            return None
        self._n_failures += 1
        self._metrics.write("save failed", {"step": step, "problem": failure.problem})
        self._show(step, f"warning: {failure.problem}; training continues, and will save again")
        if self._n_failures < FAILURES_LIMIT:
            return None
        return str(
            StopReason(f"{self._n_failures} checkpoints in a row could not be saved", EXIT_HOLD)
        )

    def pause(self, step: int) -> None:
        """Waits for any save in flight, and reports it."""
        with suppress(MachineError):
            self._saver.wait()
        self.report_finished(step)

    def finish(self, step: int) -> None:
        """Waits for the last save and reports it.

        Raises:
            MachineError: it failed.
        """
        self._saver.wait()
        self.report_finished(step)
