"""What ranks that save together tell each other: JSON files in the folder that is being written.

    parts-00003.json   {"tensors": {"model.final_norm.weight": {..., "chunks": [one]}, ...},
                        "files": {"model-00003-of-00016.safetensors": {...}, ...}, "failure": null}
    parts-00004.json   {"tensors": {}, "files": {},
                        "failure": {"problem": "No space left on device", "hint": "free ..."}}

Rank 0 joins them to the manifest; they are gone when the folder becomes a checkpoint.
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
"""What a disk can do to a save; anything else is a bug."""
FREE_SPACE = "free space or quota on that disk; earlier checkpoints are untouched"


class Failure(BaseModel):
    """Why a rank could not do its share, as in `MachineError`."""

    problem: str
    hint: str


class RankManifest(BaseModel):
    """What one rank wrote: its chunks of tensors, or why it could not."""

    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    failure: Failure | None = None


def parts_name(rank: int) -> str:
    """Names the file that a rank leaves for rank 0."""
    return f"parts-{rank:05d}.json"


def failure_of(error: Exception) -> Failure:
    """Says in words what went wrong."""
    if isinstance(error, MachineError):
        return Failure(problem=error.problem, hint=error.hint)
    problem = str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
    return Failure(problem=problem, hint=FREE_SPACE)


def describe_part(tensor: Tensor, place: Placement, file: str, sha256: str) -> StoredTensor:
    """Makes the entry of a tensor of which this is the only chunk known so far."""
    assert tuple(tensor.shape) == place.local_shape, (tensor.shape, place)
    chunk = Chunk(offset=place.offsets, shape=place.local_shape, file=file, sha256=sha256)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(dtype=dtype, shape=place.shape, chunks=(chunk,))


def read_parts(folder: Path, n_ranks: int) -> list[RankManifest]:
    """Reads what every rank wrote.

    Raises:
        MachineError: one failed, for the reason it gives, or left nothing that can be read.
    """
    parts: list[RankManifest] = []
    silent: list[int] = []
    for rank in range(n_ranks):
        try:
            parts.append(RankManifest.model_validate_json((folder / parts_name(rank)).read_bytes()))
        except (OSError, ValidationError):  # not even the reason could be written
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
    """Joins what all ranks wrote; whether it is everything is for the manifest to find out.

    Raises:
        ValueError: two ranks see one tensor differently.
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
