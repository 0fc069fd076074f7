"""Streams weights from one layout to another, one tensor at a time.

It neither maps files into memory nor holds lists of tensors, so it only needs memory for the
largest tensor and the copies of its conversion. An outline describes a future tensor: its dtype
and shape on the device "meta".

    outlines  {"model.embedding.weight": meta (50304, 768), ...}
    make      "model.embedding.weight" -> its values, read and converted on demand
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from trainyard.checkpoint.format import (
    MANIFEST,
    OLDER_IS_KEPT,
    Chunk,
    Facts,
    Manifest,
    StoredFile,
    StoredTensor,
    header_sha256,
    read_manifest,
    render_manifest,
    step_folder_name,
)
from trainyard.checkpoint.save import describe_part, write_tokenizer
from trainyard.checkpoint.shard import (
    DTYPES,
    SHARD_LIMIT_BYTES,
    Values,
    checksum_values,
    read_header,
    read_values,
    split_in_shards,
)
from trainyard.data.vocabulary import Vocabulary
from trainyard.errors import CheckpointError
from trainyard.files import flush
from trainyard.parallel.placement import whole

Make = Callable[[str], Tensor]
Shape = tuple[int, ...]

_CODE_OF = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def outline(shapes: Mapping[str, Shape], dtype: torch.dtype) -> dict[str, Tensor]:
    """Describes tensors of one type without their values."""
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}


@dataclass
class CheckpointWeights:
    """The model's weights in a checkpoint of any layout, one whole tensor at a time."""

    path: Path
    manifest: Manifest
    _headers: dict[str, dict[str, Values]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> CheckpointWeights:
        """Reads the manifest.

        Raises:
            CheckpointError: it is damaged.
        """
        return cls(path, read_manifest(path))

    def n_rows(self) -> int:
        """Counts the rows of the embedding, including padding; 0 if there is none."""
        stored = self.manifest.tensors.get("model.embedding.weight")
        return stored.shape[0] if stored and stored.shape else 0

    def require(self, name: str, shape: Shape) -> None:
        """Checks that a parameter exists.

        Raises:
            CheckpointError: it does not, or has another shape.
        """
        stored = self.manifest.tensors.get(f"model.{name}")
        found = None if stored is None else list(stored.shape)
        if found != list(shape):
            raise CheckpointError(
                f"tensor 'model.{name}' in {self.path} "
                + ("is missing" if found is None else f"has shape {found}")
                + f"; its run needs {list(shape)}",
                OLDER_IS_KEPT,
            )

    def read(self, name: str) -> Tensor:
        """Reads a parameter and verifies its checksums.

        Raises:
            CheckpointError: it is damaged.
        """
        stored = self.manifest.tensors[f"model.{name}"]
        if len(stored.chunks) == 1:
            return self._read_chunk(f"model.{name}", stored, stored.chunks[0])
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for chunk in stored.chunks:
            spans = zip(chunk.offset, chunk.shape, strict=True)
            part = tuple(slice(start, start + length) for start, length in spans)
            tensor[part] = self._read_chunk(f"model.{name}", stored, chunk)
        return tensor

    def _read_chunk(self, name: str, stored: StoredTensor, chunk: Chunk) -> Tensor:
        path = self.path / chunk.file
        if chunk.file not in self._headers:
            self._headers[chunk.file] = read_header(path)
        values = self._headers[chunk.file].get(name)
        dtype = DTYPES[stored.dtype]
        if values is None or (values.dtype, values.shape) != (dtype, chunk.shape):
            raise CheckpointError(
                f"{path} has no tensor {name!r} that is {stored.dtype} {list(chunk.shape)}, "
                "as the manifest says",
                OLDER_IS_KEPT,
            )
        tensor = torch.empty(chunk.shape, dtype=dtype)
        found = read_values(values, tensor, chunk.checksum)
        if found != chunk.checksum:
            raise CheckpointError(
                f"{path} is damaged: the checksum of {name!r} in it is {found}, "
                f"the manifest says {chunk.checksum}",
                OLDER_IS_KEPT,
            )
        return tensor


def write_tensors(path: Path, outlines: Mapping[str, Tensor], make: Make) -> dict[str, str]:
    """Writes and flushes one safetensors file; returns the checksum of each tensor's values.

    Args:
        path: the file.
        outlines: by name, in the order of the file.
        make: returns the values, of any dtype, in the outline's shape.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # required by transformers
    end = 0
    for name, tensor in outlines.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _CODE_OF[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, like in outlines.items():
            checksums[name] = _write_values(file, name, like, make)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def _write_values(file: IO[bytes], name: str, like: Tensor, make: Make) -> str:
    """Writes one tensor, freed before the next one; returns its checksum."""
    tensor = make(name).to(like.dtype).contiguous()
    assert tensor.shape == like.shape, (name, tensor.shape, like.shape)
    if not all(map(torch.isfinite, tensor.aminmax())):
        dtype = str(like.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"tensor {name!r} has values that are not finite in {dtype}",
            "take an earlier checkpoint" + (", or --dtype bfloat16" if dtype == "float16" else ""),
        )
    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return checksum_values(tensor)


def write_weights(
    folder: Path,
    facts: Facts,
    outlines: Mapping[str, Tensor],
    make: Make,
    vocabulary: Vocabulary | None = None,
    limit_bytes: int = SHARD_LIMIT_BYTES,
) -> Path:
    """Writes a weights-only checkpoint to `folder`, file by file; returns its path.

    Args:
        folder: a temporary folder to rename later, since the write is not atomic.
        facts: for its manifest.
        outlines: by global name, those of the model.
        make: returns the values.
        vocabulary: of the tokenizer.
        limit_bytes: per file, unless a single tensor is larger.
    """
    final = folder / step_folder_name(facts.step)
    final.mkdir(parents=True)
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    shards = split_in_shards(outlines, limit_bytes)
    for index, shard in enumerate(shards):
        name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        for tensor, checksum in write_tensors(final / name, shard, make).items():
            place = whole(shard[tensor].shape)
            tensors[tensor] = describe_part(shard[tensor], place, name, checksum)
        size = (final / name).stat().st_size
        files[name] = StoredFile(n_bytes=size, header_sha256=header_sha256(final / name))
    tokenizer = write_tokenizer(final, vocabulary)
    manifest = Manifest(**dict(facts), tensors=tensors, files=files, tokenizer=tokenizer)
    (final / MANIFEST).write_bytes(render_manifest(manifest))
    flush(final / MANIFEST)
    flush(final)
    return final
