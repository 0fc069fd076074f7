"""Writes checkpoints so that a crash at any moment leaves the ones before intact.

Everything is written and flushed under a hidden name; one rename makes it a checkpoint:

    .step-00002000.partial/  ->  step-00002000/
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainyard.checkpoint.format import (
    MANIFEST,
    Chunk,
    Facts,
    Manifest,
    StoredFile,
    StoredTensor,
    list_checkpoints,
    read_manifest,
    render_manifest,
    sha256_of,
    step_folder_name,
)
from trainyard.errors import CheckpointError, MachineError
from trainyard.units import format_bytes

# Small enough that several cores share the hashing of one model, large enough for few files.
SHARD_LIMIT_BYTES = 2**30
_ROOM_FOR_MANIFEST_BYTES = 2**20
_PARTIAL = ".partial"


def save_checkpoint(folder: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> Path:
    """Writes the checkpoint of one step into `folder` and returns its path.

    A checkpoint of the same step is replaced. No second copy of the tensors is held, except of one
    shard of those that are on a GPU.

    Args:
        folder: the run's checkpoints, made when absent.
        facts: the step and what belongs to it.
        tensors: by global name; the part before the first dot names the files.

    Raises:
        MachineError: no room, or the disk cannot be written; older checkpoints are as they were.
    """
    final = folder / step_folder_name(facts.step)
    partial = folder / f".{final.name}{_PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_partials(folder)
        _require_space(folder, sum(tensor.nbytes for tensor in tensors.values()))
        partial.mkdir()
        _write(partial, facts, tensors)
        _publish(partial, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise MachineError(
            f"cannot write the checkpoint {final}: {error}",
            "free space or quota on that disk; the checkpoints before this one are untouched",
        ) from error
    return final


def keep_newest(folder: Path, n_checkpoints: int) -> list[Path]:
    """Removes what is older than the newest complete checkpoints, and returns what it removed.

    With fewer than `n_checkpoints` complete ones, nothing is removed.
    """
    assert n_checkpoints >= 1, n_checkpoints
    newest_first = list_checkpoints(folder)
    complete = [path for path in newest_first if _is_complete(path)]
    if len(complete) < n_checkpoints:
        return []
    oldest_kept = newest_first.index(complete[n_checkpoints - 1])
    removed = newest_first[oldest_kept + 1 :]
    for path in removed:
        _remove(path)
    return removed


def split_in_shards(
    tensors: Mapping[str, Tensor], limit_bytes: int = SHARD_LIMIT_BYTES
) -> list[dict[str, Tensor]]:
    """Deals tensors, in their order, to shards within `limit_bytes`, or of one larger tensor."""
    shards: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append({})
            room = limit_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one safetensors file; flushing it is left to the caller."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(partial: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    stored: dict[str, StoredTensor] = {}
    names: list[str] = []
    # The disk and the checksum of one shard are waited for while the next ones are written.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        finished = []
        for name, shard in _named_shards(tensors):
            write_shard(partial / name, shard)
            finished.append(pool.submit(_finish_file, partial / name))
            names.append(name)
            stored |= {key: _describe(tensor, name) for key, tensor in shard.items()}
        files = {name: future.result() for name, future in zip(names, finished, strict=True)}
    manifest = Manifest(**dict(facts), tensors=stored, files=files)
    (partial / MANIFEST).write_bytes(render_manifest(manifest))
    flush(partial / MANIFEST)
    flush(partial)


def _named_shards(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for part in dict.fromkeys(name.partition(".")[0] for name in tensors):
        own = {name: t for name, t in tensors.items() if name.startswith(f"{part}.")}
        shards = split_in_shards(own)
        for index, shard in enumerate(shards):
            yield f"{part}-{index:05d}-of-{len(shards):05d}.safetensors", shard


def _finish_file(path: Path) -> StoredFile:
    flush(path)
    return StoredFile(n_bytes=path.stat().st_size, sha256=sha256_of(path))


def _describe(tensor: Tensor, file: str) -> StoredTensor:
    shape = tuple(tensor.shape)
    chunk = Chunk(offset=(0,) * len(shape), shape=shape, file=file)
    return StoredTensor(
        dtype=str(tensor.dtype).removeprefix("torch."), shape=shape, chunks=(chunk,)
    )


def _publish(partial: Path, final: Path) -> None:
    replaced = _rename_to_partial(final) if final.exists() else None
    partial.rename(final)
    flush(final.parent)
    if replaced:
        shutil.rmtree(replaced)


def _require_space(folder: Path, tensors_bytes: int) -> None:
    needed = tensors_bytes + tensors_bytes // 1000 + _ROOM_FOR_MANIFEST_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"a checkpoint of {format_bytes(needed)} does not fit in {folder}: "
            f"{format_bytes(free)} free",
            "free space there, or keep fewer with checkpoint.keep_last; nothing was removed",
        )


def _is_complete(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def _remove(path: Path) -> None:
    """Takes the name away first, so that half a folder is never taken for a checkpoint."""
    shutil.rmtree(_rename_to_partial(path))


def _rename_to_partial(path: Path) -> Path:
    return path.rename(path.with_name(f".{path.name}.old{_PARTIAL}"))


def _remove_partials(folder: Path) -> None:
    for path in folder.glob(f".step-*{_PARTIAL}"):
        shutil.rmtree(path)
