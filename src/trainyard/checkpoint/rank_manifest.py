"""Manifests of ranks that save together: JSON files in the folder being written.

    parts-00003.json   {"tensors": {"model.final_norm.weight": {..., "chunks": [one]}, ...},
                        "files": {"model-00003-of-00016.safetensors": {...}, ...}, "failure": null}
    parts-00004.json   {"tensors": {}, "files": {},
                        "failure": {"problem": "No space left on device", "hint": "free ..."}}

Rank 0 merges them into the manifest, and removes them before the folder becomes a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from trainyard.checkpoint.format import Chunk, StoredFile, StoredTensor
from trainyard.errors import MachineError
from trainyard.parallel.placement import Placement

EXPECTED = (OSError, SafetensorError, MachineError)
"""Errors from a disk; anything else is a bug."""
FREE_SPACE = "free space or quota on that disk; earlier checkpoints are untouched"


class Failure(BaseModel):
    """Why a rank failed, as in `MachineError`."""

    problem: str
    hint: str


class RankManifest(BaseModel):
    """One rank's chunks of tensors, or why it failed."""

    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    failure: Failure | None = None


def parts_name(rank: int) -> str:
    """Names a rank's file for rank 0."""
    return f"parts-{rank:05d}.json"


def failure_of(error: Exception) -> Failure:
    """Describes an error."""
    if isinstance(error, MachineError):
        return Failure(problem=error.problem, hint=error.hint)
    problem = str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
    return Failure(problem=problem, hint=FREE_SPACE)


def describe_part(tensor: Tensor, place: Placement, file: str, sha256: str) -> StoredTensor:
    """Makes the entry of a tensor with this one chunk."""
    assert tuple(tensor.shape) == place.local_shape, (tensor.shape, place)
    chunk = Chunk(offset=place.offsets, shape=place.local_shape, file=file, sha256=sha256)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(dtype=dtype, shape=place.shape, chunks=(chunk,))


def read_parts(folder: Path, n_ranks: int) -> list[RankManifest]:
    """Reads the manifests of all ranks.

    Raises:
        MachineError: one failed, for the reason it gives, or left no readable file.
    """
    parts: list[RankManifest] = []
    silent: list[int] = []
    for rank in range(n_ranks):
        try:
            parts.append(RankManifest.model_validate_json((folder / parts_name(rank)).read_bytes()))
        except (OSError, ValidationError):  # it could not even write the reason
            silent.append(rank)
            continue
        failure = parts[-1].failure
        if failure:
            raise MachineError(f"rank {rank}: {failure.problem}", failure.hint)
    if silent:
        raise MachineError(f"rank {silent[0]} could not write to {folder}", FREE_SPACE)
    return parts


def join_parts(
    ranks: list[RankManifest],
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Merges the manifests of all ranks; the final manifest checks completeness.

    Raises:
        ValueError: two ranks disagree about a tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    chunks: dict[str, list[Chunk]] = {}
    for name, stored in (item for rank in ranks for item in rank.tensors.items()):
        first = tensors.setdefault(name, stored)
        if (first.dtype, first.shape) != (stored.dtype, stored.shape):
            raise ValueError(
                f"{name!r} is {first.dtype} {list(first.shape)} on one rank, "
                f"{stored.dtype} {list(stored.shape)} on another"
            )
        chunks.setdefault(name, []).extend(stored.chunks)
    for name, joined in chunks.items():
        in_order = tuple(sorted(joined, key=lambda chunk: chunk.offset))
        tensors[name] = tensors[name].model_copy(update={"chunks": in_order})
    return tensors, {name: file for rank in ranks for name, file in rank.files.items()}
