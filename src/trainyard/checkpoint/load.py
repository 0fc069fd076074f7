"""Loads checkpoints: finds the newest complete one, checks its files, fills tensors from it.

Nothing is unpickled: metadata is JSON, values are safetensors.

Each rank reads the chunks that overlap its shards, for any saved layout, without communication:

    saved by 2 ranks, rows       0.......3 4.......7
    loaded by 3 ranks            0.....2 3.....5 6.7     the second reads one row of the first
                                                         chunk and two of the second
Every rank checks the checksum of each chunk it reads. It reads a chunk that it needs whole directly
into place, others a few rows at a time: loading takes 8 MiB for each thread, in any layout.
Of the manifest's files it opens only those with such chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trainyard.architecture import parameter_shapes
from trainyard.checkpoint.format import (
    OLDER_IS_KEPT,
    TOKENIZER,
    Chunk,
    Grid,
    Manifest,
    read_manifest,
)
from trainyard.checkpoint.shard import DTYPES, THREADS, Values, read_header, read_values
from trainyard.config.run import Run
from trainyard.data.vocabulary import Vocabulary, load_vocabulary
from trainyard.errors import CheckpointError
from trainyard.model.gpt import GPT
from trainyard.parallel.placement import Placement, whole

logger = logging.getLogger("trainyard")

# Rows beyond the vocabulary are padding, which depends on the layout and is never read.
_PADDED_PARAMETERS = ("embedding.weight", "head.weight")


def load_tensors(path: Path, prefix: str = "model.") -> dict[str, Tensor]:
    """Reads whole tensors whose names start with `prefix`, and strips it from the names.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    stored = {name: t for name, t in manifest.tensors.items() if name.startswith(prefix)}
    tensors = {name: torch.empty(t.shape, dtype=DTYPES[t.dtype]) for name, t in stored.items()}
    _fill(path, manifest, tensors, {name: whole(t.shape) for name, t in stored.items()})
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def load_into(
    path: Path,
    tensors: Mapping[str, Tensor],
    vocabulary_size: int,
    placements: Mapping[str, Placement] | None = None,
    manifest: Manifest | None = None,
) -> None:
    """Fills tensors in place, on any device, from those of the same names.

    Args:
        path: a checkpoint folder, saved with any layout; only `tensors` are read from it.
        tensors: by global name.
        vocabulary_size: rows of embedding and head that must exist; padding above may differ, and
            rows missing in the checkpoint stay unchanged.
        placements: their positions in the whole tensors; without one, a tensor is whole.
        manifest: of the checkpoint, if already read; a large one takes long to read.

    Raises:
        CheckpointError: the checkpoint is damaged, or a tensor is missing or has another shape or
            type. Damage is found late, after some tensors may have been filled.
    """
    manifest = manifest or read_manifest(path)
    places = {name: whole(t.shape) for name, t in tensors.items()} | dict(placements or {})
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == places[name].local_shape, (name, tensor.shape, places[name])
        stored = _require_tensor(path, manifest, name, _types_of(name, tensor.dtype))
        _check_shape(path, name, stored, places[name].shape, vocabulary_size)

    _fill(path, manifest, tensors, places)


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
    with torch.device(device):
        model = GPT(run.model, n_rows, compute_dtype)
    parameters = {
        f"model.{name}": tensor for name, tensor in model.state_dict(keep_vars=True).items()
    }
    load_into(path, parameters, run.model.vocabulary_size, manifest=manifest)
    return model.eval(), run, manifest


def load_tokenizer_copy(path: Path, manifest: Manifest) -> Vocabulary | None:
    """Loads the tokenizer of a checkpoint: its own copy, else the one its run names.

    Raises:
        CheckpointError: the copy is damaged.
        DataError: it cannot be read.
    """
    if manifest.tokenizer is None:  # the run has none, or this is format 1
        source = manifest.build_run().tokenizer.path
        return load_vocabulary(source) if source else None
    vocabulary = load_vocabulary(path / TOKENIZER)
    if vocabulary.fingerprint != manifest.tokenizer.fingerprint:
        raise CheckpointError(
            f"{path / TOKENIZER} is damaged: its fingerprint is {vocabulary.fingerprint}, "
            f"the manifest says {manifest.tokenizer.fingerprint}",
            OLDER_IS_KEPT,
        )
    return vocabulary


def _require_model(path: Path, manifest: Manifest, run: Run) -> int:
    """Checks every shape before building a model of that size; returns the embedding's rows."""
    if run.model.n_layers > len(manifest.tensors):
        raise CheckpointError(
            f"{path} holds {len(manifest.tensors)} tensors, too few for "
            f"model.n_layers={run.model.n_layers} of its run",
            OLDER_IS_KEPT,
        )
    embedding = _require_tensor(path, manifest, "model.embedding.weight", (torch.float32,))
    n_rows = embedding.shape[0] if embedding.shape else 0
    types = _types_of("model.", torch.float32)
    for name, shape in parameter_shapes(run.model, n_rows).items():
        stored = _require_tensor(path, manifest, f"model.{name}", types)
        _check_shape(path, f"model.{name}", stored, shape, run.model.vocabulary_size)
    return n_rows


def _types_of(name: str, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Lists the stored types that can be read as a type, that one first.

    Low-precision state uses bf16 weights. Other runs read them as fp32; it also reads fp32.
    """
    is_weight = name.startswith("model.") and dtype in (torch.float32, torch.bfloat16)
    return (dtype, torch.float32, torch.bfloat16) if is_weight else (dtype,)


def _require_tensor(
    path: Path, manifest: Manifest, name: str, dtypes: tuple[torch.dtype, ...]
) -> Grid:
    stored = manifest.tensors.get(name)
    if stored is None:
        raise CheckpointError(
            f"{path} has no tensor {name!r}",
            "it belongs to another model, or was written without optimizer state",
        )
    if DTYPES[stored.dtype] not in dtypes:
        raise CheckpointError(
            f"tensor {name!r} in {path} is {stored.dtype}; "
            f"this run needs {str(dtypes[0]).removeprefix('torch.')}",
            "resume with the precision the checkpoint was written with",
        )
    return stored


def _check_shape(
    path: Path, name: str, stored: Grid, wanted: tuple[int, ...], vocabulary_size: int
) -> None:
    found = stored.shape
    fits = found == wanted
    if any(parameter in name for parameter in _PADDED_PARAMETERS):
        fits = found[1:] == wanted[1:] and min(found[0], wanted[0]) >= vocabulary_size
    if not fits:
        raise CheckpointError(
            f"tensor {name!r} in {path} has shape {list(found)}; this run needs {list(wanted)}",
            "the run's model section must match the checkpoint's: trainyard show prints it",
        )


Chunks = list[tuple[str, str, Chunk]]
"""Names of tensors, their types, and chunks of them."""


def _overlap(place: Placement, chunk: Chunk) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns the overlap of a part and a chunk: slices of the part, and of the chunk."""
    of_part, of_chunk = [], []
    for part_start, part_length, start, length in zip(
        place.offsets, place.local_shape, chunk.offset, chunk.shape, strict=True
    ):
        first = max(part_start, start)
        last = min(part_start + part_length, start + length)
        if first >= last:
            return None
        of_part.append(slice(first - part_start, last - part_start))
        of_chunk.append(slice(first - start, last - start))
    return tuple(of_part), tuple(of_chunk)


def find_chunks(manifest: Manifest, places: Mapping[str, Placement]) -> dict[int, Chunks]:
    """Finds the chunks that overlap parts of tensors; by the number of their file."""

    @cache  # of all tensors that are stored and needed alike
    def overlapping(first_name: str, place: Placement) -> list[Chunk]:
        chunks = manifest.tensors[first_name].chunks()
        return [chunk for chunk in chunks if _overlap(place, chunk) is not None]

    found: dict[int, Chunks] = {}
    for name, place in places.items():
        stored = manifest.tensors[name]
        for chunk in overlapping(stored.names[0], place):
            found.setdefault(chunk.file, []).append((name, stored.dtype, chunk))
    return found


def _fill(
    path: Path, manifest: Manifest, tensors: Mapping[str, Tensor], places: Mapping[str, Placement]
) -> None:
    """Reads and checks every chunk that overlaps these tensors."""
    chunks = find_chunks(manifest, {name: places[name] for name in tensors})

    def take(name: str, chunk: Chunk, values: Values) -> None:
        found = _read_shared(tensors[name].detach(), places[name], chunk, values)
        if found != values.checksum:
            damage = describe_damage(name, values, found)
            raise CheckpointError(f"{values.path} is damaged: {damage}", OLDER_IS_KEPT)

    names = list(manifest.files)
    pool = ThreadPoolExecutor(THREADS)
    try:
        started = [
            pool.submit(take, *found)
            for file in sorted(chunks)
            for found in find_values(path, manifest, names[file], chunks[file])
        ]
        for future in started:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_shared(target: Tensor, place: Placement, chunk: Chunk, values: Values) -> str:
    """Reads the overlap of a part and a chunk into the part; returns the chunk's checksum."""
    shared = _overlap(place, chunk)
    assert shared is not None, (place, chunk)
    of_part, of_chunk = shared
    wanted = target[of_part]
    is_alike = (wanted.shape, wanted.dtype) == (values.shape, values.dtype)
    if is_alike and wanted.is_contiguous() and wanted.is_cpu:
        return read_values(values, wanted, values.checksum)
    wanted, (rows, *columns) = wanted.view(wanted.shape or (1,)), of_chunk or (slice(0, 1),)

    def take(first: int, piece: Tensor) -> None:
        start, end = max(rows.start, first), min(rows.stop, first + len(piece))
        if start < end:
            found = piece[start - first : end - first]
            wanted[start - rows.start : end - rows.start].copy_(found[:, *columns])

    return read_values(values, take, values.checksum)


def find_values(
    path: Path, manifest: Manifest, name_of_file: str, chunks: Chunks
) -> list[tuple[str, Chunk, Values]]:
    """Locates chunks in a file of a checkpoint, in its order, with their checksums.

    Raises:
        CheckpointError: its header is damaged, or it has another tensor, or none, in place of a
            chunk.
    """
    file = path / name_of_file
    header = read_header(file, manifest.files[name_of_file].header_sha256)
    older = manifest.checksums.get(name_of_file, {})
    found = []
    for name, dtype, chunk in chunks:
        values = header.get(name)
        if values is None or (values.dtype, values.shape) != (DTYPES[dtype], chunk.shape):
            what = f"{file} has no {name!r} of {dtype} {list(chunk.shape)}, as the manifest says"
            raise CheckpointError(what, OLDER_IS_KEPT)
        found.append((name, chunk, replace(values, checksum=older.get(name, values.checksum))))
    return sorted(found, key=lambda each: each[2].start)


def describe_damage(name: str, values: Values, found: str) -> str:
    """Describes values with another checksum than was saved."""
    return f"the checksum of {name!r} in it is {found}, not {values.checksum or 'recorded'}"
