"""Between training and its checkpoints: what is saved, and how it is filled in again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from trainyard.checkpoint.background import Retention, Saver
from trainyard.checkpoint.format import (
    Facts,
    Manifest,
    list_checkpoints,
    read_manifest,
    step_of,
)
from trainyard.checkpoint.load import (
    complete_checkpoints,
    load_into,
    newest_checkpoint,
    problem_of,
)
from trainyard.checkpoint.resume import check_resumable
from trainyard.checkpoint.save import ALONE, Ranks
from trainyard.config.fp8_rules import SCALED_COLUMNS
from trainyard.errors import CheckpointError
from trainyard.launch.environment import read_versions
from trainyard.optim.adamw import prepare_state, state_of
from trainyard.parallel.placement import Placement, is_writer, local_part, place
from trainyard.plan.saving import checkpoint_bytes, rank_bytes
from trainyard.train.run_folder import Resume
from trainyard.train.state import Parts, State

logger = logging.getLogger("trainyard")

WEIGHTS = "model."
OPTIMIZER = "optimizer."
EXPONENTS = "_exponents"


def build_saver(parts: Parts) -> Saver:
    """Makes what saves the checkpoints of a run."""
    mesh, settings = parts.replica.mesh, parts.run.checkpoint
    ranks = ALONE
    if mesh.topology.n_ranks > 1:
        ranks = Ranks(mesh.rank, mesh.topology.n_ranks, mesh.saving_barrier)
    keep = Retention(settings.keep_last, settings.keep_every, settings.keep_best)
    folder = checkpoint_folder(parts.folder)
    vocabulary = parts.tokenizer.vocabulary if parts.tokenizer else None
    saver = Saver(folder, ranks, keep, background=settings.background, vocabulary=vocabulary)
    saver.reserve(rank_bytes(parts.run, parts.plan, mesh.rank), parts.device)
    return saver


def save_state(parts: Parts, state: State, saver: Saver, held_out_loss: float | None) -> None:
    """Saves weights, optimizer and progress; in the background, from a copy, if the run says so.

    Args:
        parts: of the run.
        state: how far it is.
        saver: knows what became of it; see there.
        held_out_loss: found at this very step; checkpoints are compared by it.
    """
    consumed = parts.batches.consumed(state.step)
    training = state.as_json()
    if held_out_loss is not None:
        training["held_out_loss"] = held_out_loss
    facts = Facts(
        step=state.step,
        consumed_sequences=consumed,
        consumed_tokens=consumed * parts.run.model.sequence_length,
        run=parts.run.model_dump(mode="json"),
        plan=parts.plan.as_json(),
        versions=read_versions(),
        data_fingerprint=parts.data_fingerprint,
        training=training,
    )
    tensors, placements = _named_parts(parts, to_write=True)
    saver.save(facts, tensors, placements, checkpoint_bytes(parts.run, parts.plan.n_parameters))


def checkpoint_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def find_checkpoint(run_folder: Path, resume: Resume) -> Path | None:
    """Finds the checkpoint to continue from; None where none was ever saved.

    Raises:
        CheckpointError: there is none and there must be; or there are some, and there must be none,
            or none of them is intact.
    """
    folder = checkpoint_folder(run_folder)
    there = list_checkpoints(folder)
    if not there and resume == "must":
        raise CheckpointError(
            f"no checkpoint in {folder}, and --resume must asks for one",
            "--resume auto starts from the beginning",
        )
    if there and resume == "never":
        raise CheckpointError(
            f"{there[0]} exists, and --resume never would mix two runs in one folder",
            "give the run another name, or pass --overwrite to remove its checkpoints and metrics",
        )
    path = newest_checkpoint(folder)
    if there and path is None:
        raise CheckpointError(
            f"none of the {len(there)} checkpoints in {folder} is intact, so training does not "
            "start; nothing was changed:\n"
            + "\n".join(f"  {path.name}: {problem_of(path)}" for path in there),
            "restore the files named here from a copy; or train under another name, or with "
            "--overwrite, from the beginning",
        )
    return path


def load_state(parts: Parts, resume: Resume) -> State:
    """Fills the parts from the newest checkpoint of the run folder; without one, starts at step 0.

    Raises:
        CheckpointError: all are damaged, or it is of another run or other data, or `resume`
            forbids it.
    """
    if find_checkpoint(parts.folder, resume) is None:
        return State.at_start(parts)
    return load_newest(parts, lambda _step: True)


def load_newest(parts: Parts, is_wanted: Callable[[int], bool]) -> State:
    """Fills the parts from the newest checkpoint whose step is wanted and whose bytes are intact.

    The first rank chooses, since others may see an older state of the folder. Every rank reads what
    it needs; where one finds damage, all go on to the checkpoint before.

    Raises:
        CheckpointError: none is left, or it is of another run or other data.
    """
    mesh, folder = parts.replica.mesh, checkpoint_folder(parts.folder)
    candidates = (path for path in complete_checkpoints(folder) if is_wanted(step_of(path) or 0))
    problem: str | None = None
    while True:
        chosen = next(candidates, None) if parts.is_first_rank else None
        name = mesh.agree((chosen.name if chosen else "") if parts.is_first_rank else None)
        if not name:
            break
        problem, state = _try(parts, folder / name)
        problem = mesh.agree(problem)
        if problem is None and state is not None:
            return state
        logger.warning("%s cannot be used, so the one before it is: %s", name, problem)
    raise CheckpointError(
        f"no checkpoint in {folder} can be used; the last that was tried: "
        f"{problem or 'none was old enough'}",
        "trainyard check checkpoint says what is wrong with each; restore them from a copy",
    )


def _try(parts: Parts, path: Path) -> tuple[str | None, State | None]:
    """Fills the parts from a checkpoint; gives what is wrong with it, or the state."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return error.problem, None
    tokenizer = parts.tokenizer.fingerprint if parts.tokenizer else ""
    for change in check_resumable(manifest, parts.run, parts.data_fingerprint, tokenizer):
        logger.info("changed since the checkpoint: %s", change)
    state = State.from_json(parts, manifest.step, manifest.training)
    try:
        _fill(parts, path, manifest, n_updates=manifest.step - state.skipped.total)
    except CheckpointError as error:
        return error.problem, None
    return None, state


def _fill(parts: Parts, path: Path, manifest: Manifest, n_updates: int) -> None:
    """Copies a checkpoint's tensors into model and optimizer; at step 0 there is only a model."""
    has_state = manifest.step > 0
    if has_state:
        prepare_state(parts.optimizer, n_updates)
    tensors, placements = _named_parts(parts, to_write=False)
    wanted = {name: t for name, t in tensors.items() if has_state or name.startswith(WEIGHTS)}
    load_into(path, wanted, parts.run.model.vocabulary_size, placements)
    if not has_state:
        prepare_state(parts.optimizer, None)


def _named_parts(parts: Parts, *, to_write: bool) -> tuple[dict[str, Tensor], dict[str, Placement]]:
    """Names what this rank holds of weights and moments, and says where it lies in the whole.

    Args:
        parts: of the run.
        to_write: leave out what another rank writes.
    """
    share = parts.replica.tensor_share
    tensors: dict[str, Tensor] = {}
    placements: dict[str, Placement] = {}
    for held in parts.replica.held:
        parameter, dimension = held.parameter, held.dimension
        if to_write and (held.is_copy or not is_writer(parameter, dimension, share)):
            continue
        placement = place(parameter, dimension, share)
        tensors[f"{WEIGHTS}{held.name}"] = local_part(parameter)
        placements[f"{WEIGHTS}{held.name}"] = placement
        for what, value in state_of(parts.optimizer, held).items():
            name = f"{OPTIMIZER}{held.name}.{what}"
            tensors[name] = value
            placements[name] = _of_scales(placement) if what.endswith(EXPONENTS) else placement
    return tensors, placements


def _of_scales(of_matrix: Placement) -> Placement:
    """Says where exponents lie, of which one stands for many columns of a matrix."""
    shapes = (of_matrix.shape, of_matrix.offsets, of_matrix.local_shape)
    return Placement(*((rows, columns // SCALED_COLUMNS) for rows, columns in shapes))
