"""Reads checkpoints: finds the newest complete one, checks its files, fills tensors from it.

Nothing is unpickled: JSON says what there is, safetensors holds the values, mapped into memory.
Every file that is read is compared with its checksum first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainyard.checkpoint.format import (
    DTYPES,
    MANIFEST,
    OLDER_IS_KEPT,
    Manifest,
    StoredTensor,
    list_checkpoints,
    read_manifest,
    sha256_of,
    step_of,
)
from trainyard.config.run import Run
from trainyard.errors import CheckpointError
from trainyard.model.gpt import GPT
from trainyard.plan.size import parameter_shapes

logger = logging.getLogger("trainyard")

# Their rows beyond the vocabulary are padding, which depends on the layout; nothing ever reads it.
_PADDED_PARAMETERS = ("embedding.weight", "head.weight")


def newest_checkpoint(folder: Path) -> Path | None:
    """Finds the checkpoint of the highest step in `folder` whose manifest and file sizes are right.

    Newer ones that are incomplete are passed over with a warning.
    """
    for path in list_checkpoints(folder):
        try:
            read_manifest(path)
        except CheckpointError as error:
            logger.warning("passing over %s: %s", path.name, error.problem)
        else:
            return path
    return None


def find_checkpoint(path: Path) -> Path:
    """Finds the checkpoint that a user means: a step folder, or the newest of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if step_of(path) is not None or (path / MANIFEST).exists():
        return path
    inner = path / "checkpoints"
    newest = newest_checkpoint(inner if inner.is_dir() else path)
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {path}" if path.is_dir() else f"no folder {path}",
            "give a run folder, or one of the step-... folders in its checkpoints/",
        )
    return newest


def verify_checkpoint(path: Path) -> Manifest:
    """Compares every file of a checkpoint with its checksum.

    Raises:
        CheckpointError: names each damaged file, with the expected and the found checksum.
    """
    manifest = read_manifest(path)
    _require_intact(path, manifest, manifest.files)
    return manifest


def load_tensors(path: Path, prefix: str = "model.") -> dict[str, Tensor]:
    """Reads the tensors whose names begin with `prefix`, under the rest of their names.

    They are mapped from the files: read when first used, and private to this process.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    names = [name for name in manifest.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensor for name, tensor in _read(path, manifest, names)}


@torch.no_grad()
def load_into(path: Path, tensors: Mapping[str, Tensor], vocabulary_size: int) -> None:
    """Fills tensors in place, wherever they are, from those of the same names.

    Args:
        path: a checkpoint folder; what it holds beyond `tensors` is not read.
        tensors: by global name.
        vocabulary_size: rows of embedding and head that must be there; padding above may differ.

    Raises:
        CheckpointError: the checkpoint is damaged, or a tensor is missing or of another shape or
            type.
    """
    manifest = read_manifest(path)
    for name, tensor in tensors.items():
        stored = _require_tensor(path, manifest, name, tensor.dtype)
        _check_shape(path, name, stored, tuple(tensor.shape), vocabulary_size)
    for name, value in _read(path, manifest, tensors):
        target = tensors[name]
        if target.shape != value.shape:
            n_rows = min(target.shape[0], value.shape[0])
            target, value = target[:n_rows], value[:n_rows]
        target.copy_(value)


def build_model_from_checkpoint(
    path: Path,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[GPT, Run, Manifest]:
    """Builds the trained model of a checkpoint, in evaluation mode.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not hold the model its run describes.
    """
    manifest = read_manifest(path)
    run = manifest.build_run()
    n_rows = _require_model(path, manifest, run)
    with torch.device("meta"):
        model = GPT(run.model, n_rows, compute_dtype)
    model.to_empty(device=device)
    parameters = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    load_into(path, parameters, run.model.vocabulary_size)
    return model.eval(), run, manifest


def _require_model(path: Path, manifest: Manifest, run: Run) -> int:
    """Checks every shape before a model of that size is made; returns the rows of the embedding."""
    if run.model.n_layers > len(manifest.tensors):
        raise CheckpointError(
            f"{path} holds {len(manifest.tensors)} tensors, too few for "
            f"model.n_layers={run.model.n_layers} of its run",
            OLDER_IS_KEPT,
        )
    embedding = _require_tensor(path, manifest, "model.embedding.weight", torch.float32)
    n_rows = embedding.shape[0] if embedding.shape else 0
    for name, shape in parameter_shapes(run.model, n_rows).items():
        stored = _require_tensor(path, manifest, f"model.{name}", torch.float32)
        _check_shape(path, f"model.{name}", stored, shape, run.model.vocabulary_size)
    return n_rows


def _require_tensor(path: Path, manifest: Manifest, name: str, dtype: torch.dtype) -> StoredTensor:
    stored = manifest.tensors.get(name)
    if stored is None:
        raise CheckpointError(
            f"{path} has no tensor {name!r}",
            "it belongs to another model, or was written without optimizer state",
        )
    if DTYPES[stored.dtype] != dtype:
        raise CheckpointError(
            f"tensor {name!r} in {path} is {stored.dtype}; "
            f"this run needs {str(dtype).removeprefix('torch.')}",
            "resume with the precision the checkpoint was written with",
        )
    return stored


def _check_shape(
    path: Path, name: str, stored: StoredTensor, wanted: tuple[int, ...], vocabulary_size: int
) -> None:
    found = stored.shape
    if any(parameter in name for parameter in _PADDED_PARAMETERS):
        fits = (
            len(found) == len(wanted)
            and min(found[0], wanted[0]) >= vocabulary_size
            and found[1:] == wanted[1:]
        )
    else:
        fits = found == wanted
    if not fits:
        raise CheckpointError(
            f"tensor {name!r} in {path} has shape {list(found)}; this run needs {list(wanted)}",
            "the model section of the run must be that of the checkpoint: trainyard show prints it",
        )


def _read(path: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors file by file, so that few are mapped at once."""
    in_files = sorted((manifest.tensors[name].chunks[0].file, name) for name in names)
    _require_intact(path, manifest, {file for file, _ in in_files})
    for file, group in groupby(in_files, key=lambda item: item[0]):
        try:
            with safe_open(path / file, framework="pt") as opened:
                for _, name in group:
                    yield name, _take(opened, path / file, name, manifest.tensors[name])
        except SafetensorError as error:
            raise CheckpointError(
                f"{path / file} is no safetensors file with what its manifest lists: {error}",
                OLDER_IS_KEPT,
            ) from None


def _take(opened: Any, file: Path, name: str, stored: StoredTensor) -> Tensor:
    tensor: Tensor = opened.get_tensor(name)
    if (tensor.dtype, tuple(tensor.shape)) != (DTYPES[stored.dtype], stored.shape):
        raise CheckpointError(
            f"tensor {name!r} in {file} is {tensor.dtype} {list(tensor.shape)}; "
            f"the manifest says {stored.dtype} {list(stored.shape)}",
            OLDER_IS_KEPT,
        )
    return tensor


def _require_intact(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    ordered = sorted(names)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(sha256_of, [path / name for name in ordered])
        damaged = [
            f"{path / name} is damaged: its sha256 is {checksum}, "
            f"the manifest says {manifest.files[name].sha256}"
            for name, checksum in zip(ordered, found, strict=True)
            if checksum != manifest.files[name].sha256
        ]
    if damaged:
        raise CheckpointError("\n".join(damaged), OLDER_IS_KEPT)
