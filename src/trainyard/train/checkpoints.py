"""Between training and its checkpoints: what is saved, and how it is filled in again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trainyard.checkpoint.format import Facts, Manifest, read_manifest
from trainyard.checkpoint.load import load_into, newest_checkpoint
from trainyard.checkpoint.resume import check_resumable
from trainyard.checkpoint.save import ALONE, Ranks, keep_newest, save_checkpoint
from trainyard.errors import CheckpointError
from trainyard.launch.environment import read_versions
from trainyard.parallel.placement import Placement, is_writer, local_part, place
from trainyard.train.state import Parts, SkippedSteps, State

logger = logging.getLogger("trainyard")

Resume = Literal["auto", "must", "never"]
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(parts: Parts, state: State) -> Path:
    """Saves weights, optimizer and progress as the newest checkpoint, and removes the oldest.

    Raises:
        MachineError: the disk is full or cannot be written; older checkpoints are as they were.
    """
    consumed = parts.batches.consumed(state.step)
    facts = Facts(
        step=state.step,
        consumed_sequences=consumed,
        consumed_tokens=consumed * parts.run.model.sequence_length,
        run=parts.run.model_dump(mode="json"),
        plan=parts.plan.as_json(),
        versions=read_versions(),
        data_fingerprint=parts.data_fingerprint,
        training={"skipped_steps": state.skipped.total},
    )
    folder = checkpoint_folder(parts.folder)
    mesh = parts.replica.mesh
    ranks = (
        ALONE
        if mesh.topology.n_ranks == 1
        else Ranks(mesh.rank, mesh.topology.n_ranks, mesh.barrier)
    )
    path = save_checkpoint(folder, facts, *_named_parts(parts, to_write=True), ranks)
    if parts.is_first_rank:
        keep_newest(folder, parts.run.checkpoint.keep_last)
    return path


def checkpoint_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"


def find_checkpoint(run_folder: Path, resume: Resume) -> Path | None:
    """Finds the checkpoint to continue from.

    Raises:
        CheckpointError: there is none and there must be, or there is one and there must not.
    """
    folder = checkpoint_folder(run_folder)
    path = newest_checkpoint(folder)
    if path is None and resume == "must":
        raise CheckpointError(
            f"no complete checkpoint in {folder}, and --resume must asks for one",
            "--resume auto starts from the beginning",
        )
    if path is not None and resume == "never":
        raise CheckpointError(
            f"{path} exists, and --resume never would mix two runs in one folder",
            "give the run another name, or remove its folder",
        )
    return path


def load_state(parts: Parts, resume: Resume) -> State:
    """Fills the parts from the newest checkpoint of the run folder; without one, starts at step 0.

    Raises:
        CheckpointError: it is damaged, of another run or other data, or `resume` forbids it.
    """
    path = find_checkpoint(parts.folder, resume)
    if path is None:
        return State(0, SkippedSteps(0, parts.device))
    manifest = read_manifest(path)
    for change in check_resumable(manifest, parts.run, parts.data_fingerprint):
        logger.info("changed since the checkpoint: %s", change)
    skipped = manifest.training.get("skipped_steps", 0)
    assert isinstance(skipped, int)
    _fill(parts, path, manifest, n_updates=manifest.step - skipped)
    return State(manifest.step, SkippedSteps(skipped, parts.device))


def _fill(parts: Parts, path: Path, manifest: Manifest, n_updates: int) -> None:
    """Copies a checkpoint's tensors into model and optimizer; at step 0 there is only a model."""
    if manifest.step > 0:
        for held in parts.replica.held:
            parameter = held.parameter
            moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            n_updates_so_far = torch.tensor(float(n_updates), device=parameter.device)
            parts.optimizer.state[parameter] = {"step": n_updates_so_far, **moments}
    tensors, placements = _named_parts(parts, to_write=False)
    load_into(path, tensors, parts.run.model.vocabulary_size, placements)


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
        values: dict[str, Tensor] = {f"model.{held.name}": parameter}
        for moment in MOMENTS:
            if parameter in parts.optimizer.state:
                value = parts.optimizer.state[parameter][moment]
                values[f"optimizer.{held.name}.{moment}"] = value
        for name, value in values.items():
            tensors[name] = local_part(value)
            placements[name] = place(parameter, dimension, share)
    return tensors, placements
