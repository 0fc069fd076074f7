"""Writes and reads safetensors files at disk speed, with checksums.

    byte 0    8                     8 + n                                  end of the file
         +----+---------------------+------------------+-----------------+
         | n  | JSON header, spaces | values of "b"    | values of "a"   |
         +----+---------------------+------------------+-----------------+
    {"b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
     "a": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]}}

Values move between memory and file in pieces, without another copy. Hashing one piece overlaps with
I/O of the next: each of several threads takes a tensor, and neither I/O nor hashing holds the GIL.
The kernel would start writing only at the flush; here writeback starts after every piece, so little
is left for the final flush.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final

import msgspec
import torch
from torch import Tensor

from trainyard.checkpoint.format import DTYPE_BYTES, HEADER_LIMIT_BYTES, StoredFile
from trainyard.errors import CheckpointError
from trainyard.files import open_file

# Few files, each small enough to move.
SHARD_LIMIT_BYTES: Final = 2**30
# More than two cores hash at the rate of most disks; one more thread waits for I/O.
THREADS: Final = 4
# Large, because each piece waits for the GIL, which a busy training loop releases every 5 ms.
_PIECE_BYTES = 8 * 2**20
# No early writeback below this: it would write pages shared by two tensors twice.
_WORTH_TELLING_BYTES = 2**20
# Values start at a page boundary.
_HEADER_ALIGNMENT_BYTES = 4096
_TAKE_ANOTHER = "copy or download the file again"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""By torch's name."""
_CODES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
}
_CODE_OF = {DTYPES[name]: code for code, name in _CODES.items()}


@dataclass(frozen=True)
class Values:
    """Where the values of a tensor are."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The first byte, from the start of the file."""
    n_bytes: int


@dataclass(frozen=True)
class Written:
    """A file on disk, and the checksums of its tensors."""

    file: StoredFile
    sha256: dict[str, str]


class _Entry(msgspec.Struct):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def split_in_shards(
    tensors: Mapping[str, Tensor], limit_bytes: int = SHARD_LIMIT_BYTES
) -> list[dict[str, Tensor]]:
    """Groups tensors, in order, into shards within `limit_bytes`, or of one larger tensor."""
    shards: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append({})
            room = limit_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def write_shards(shards: Mapping[Path, Mapping[str, Tensor]]) -> dict[Path, Written]:
    """Writes files of named tensors, and returns once all are on disk.

    Copies GPU tensors and non-contiguous ones a few at a time.

    Raises:
        OSError: no space, or the disk cannot be written; leaves the files as they are.
    """
    with ExitStack() as stack:
        for path in shards:
            path.unlink(missing_ok=True)  # not overwritten: tensors may be mapped from it
        opened = [
            (path, stack.enter_context(path.open("xb", buffering=0)), *_lay_out(tensors))
            for path, tensors in shards.items()
        ]
        pool = ThreadPoolExecutor(THREADS)
        stack.callback(pool.shutdown, cancel_futures=True)
        started = []
        for path, file, header, starts in opened:
            _write_all(file, memoryview(header), 0)
            turn = Lock()
            futures = {
                name: pool.submit(_write_values, file, turn, start, shards[path][name])
                for name, start in starts.items()
            }
            started.append((path, file, header, futures))
        return {path: _finish(file, header, futures) for path, file, header, futures in started}


def read_header(path: Path) -> dict[str, Values]:
    """Reads where the tensors of a file are, in file order.

    They must fill it exactly, without gaps or overlaps.

    Raises:
        CheckpointError: it cannot be read, or is not a safetensors file.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            n_bytes = int.from_bytes(file.read(8), "little")
            if n_bytes > min(size - 8, HEADER_LIMIT_BYTES):
                raise _malformed(path, f"its header would have {n_bytes} bytes")
            entries = msgspec.json.decode(file.read(n_bytes), type=dict[str, _Entry])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", _TAKE_ANOTHER) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(path, str(error)) from None
    entries.pop("__metadata__", None)
    found, filled = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        dtype = DTYPES.get(_CODES.get(entry.dtype, ""))
        if dtype is None or min(entry.shape, default=0) < 0:
            raise _malformed(path, f"{name!r} is {entry.dtype} {list(entry.shape)}")
        if not 0 <= start <= end <= size - 8 - n_bytes:
            raise _malformed(path, f"{name!r} is at {start}:{end}, beyond its end")
        if end - start != math.prod(entry.shape) * dtype.itemsize:
            raise _malformed(path, f"{name!r} has {end - start} bytes for {list(entry.shape)}")
        if start != filled:
            raise _malformed(path, f"{name!r} begins at {start}, not at the next byte, {filled}")
        filled = end
        found[name] = Values(path, dtype, entry.shape, 8 + n_bytes + start, end - start)
    if filled != size - 8 - n_bytes:
        raise _malformed(path, f"{size - 8 - n_bytes - filled} bytes belong to no tensor")
    return found


def read_values(values: Values, into: Tensor | None = None) -> str:
    """Reads the values of a tensor from disk and returns their SHA-256 in hex.

    Args:
        values: where they are.
        into: filled with them; a contiguous CPU tensor of their type and number. Without it, they
            are only hashed.

    Raises:
        CheckpointError: the disk fails, or the file is truncated.
    """
    digest = hashlib.sha256()
    whole = None if into is None else _bytes_of(into)
    room = memoryview(bytearray(min(values.n_bytes, _PIECE_BYTES))) if whole is None else whole
    try:
        with values.path.open("rb", buffering=0) as file:
            for done in range(0, values.n_bytes, _PIECE_BYTES):
                n_bytes = min(_PIECE_BYTES, values.n_bytes - done)
                piece = room[:n_bytes] if whole is None else whole[done : done + n_bytes]
                _read_all(file, piece, values.start + done)
                digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"{values.path} cannot be read: {error}", _TAKE_ANOTHER) from None
    return digest.hexdigest()


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Returns the header of a file, and the byte offset of each tensor."""
    entries, offsets, end = {}, {}, 0
    # Wide types first, so that all are aligned to their width.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        offsets[name], end = end, end + tensor.nbytes
        code, shape = _CODE_OF[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def _write_values(file: BinaryIO, turn: Lock, start: int, tensor: Tensor) -> str:
    """Writes the values of a tensor at a byte of a file; returns their SHA-256 in hex.

    The kernel lets one thread at a time write to a file, and the others spin: here they sleep.
    """
    digest = hashlib.sha256()
    values = tensor.detach().reshape(-1)
    n_values = _PIECE_BYTES // tensor.itemsize
    for first in range(0, len(values), n_values):
        piece = _bytes_of(values[first : first + n_values].cpu())
        with turn:
            _write_all(file, piece, start)
        if len(piece) >= _WORTH_TELLING_BYTES:
            _begin_to_flush(file, start, len(piece))
        digest.update(piece)
        start += len(piece)
    return digest.hexdigest()


def _finish(file: BinaryIO, header: bytes, futures: Mapping[str, Future[str]]) -> Written:
    checksums = {name: future.result() for name, future in futures.items()}
    os.fsync(file.fileno())
    n_bytes = os.fstat(file.fileno()).st_size
    stored = StoredFile(n_bytes=n_bytes, header_sha256=hashlib.sha256(header).hexdigest())
    return Written(stored, checksums)


def _begin_to_flush(file: BinaryIO, start: int, n_bytes: int) -> None:
    """Starts writeback of a part of a file, where supported; returns at once.

    It advises the kernel that these pages are not needed soon. Linux then starts to write dirty
    ones, without waiting.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(file.fileno(), start, n_bytes, os.POSIX_FADV_DONTNEED)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write_all(file: BinaryIO, piece: memoryview, start: int) -> None:
    while piece:
        n_bytes = os.pwrite(file.fileno(), piece, start)
        piece, start = piece[n_bytes:], start + n_bytes


def _read_all(file: BinaryIO, piece: memoryview, start: int) -> None:
    while piece:
        n_bytes = os.preadv(file.fileno(), [piece], start)
        if n_bytes == 0:
            raise OSError(f"it ends at byte {start}")
        piece, start = piece[n_bytes:], start + n_bytes


def _malformed(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a safetensors file: {why}", _TAKE_ANOTHER)


def values_sha256(tensor: Tensor) -> str:
    """Computes the SHA-256 of a contiguous CPU tensor's values, in hex."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
