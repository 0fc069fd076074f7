"""Writes and reads safetensors files at disk speed, with checksums.

    byte 0    8                     8 + n                                  end of the file
         +----+---------------------+------------------+-----------------+
         | n  | JSON header, spaces | values of "b"    | values of "a"   |
         +----+---------------------+------------------+-----------------+
    {"b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
     "a": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
     "__metadata__": {"format": "pt", "xxh3_128": "checksums of the values, in order"}}

Each file is written by one thread, past the page cache where the file system allows it: values are
copied to a buffer, hashed there while they are in the processor's cache, and written when it is
full. The header, which has their checksums, comes last. Values are read into place, without another
copy, several tensors at a time. Neither copying nor hashing nor I/O holds the GIL, so one thread
hashes while another waits for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from trainyard.checkpoint.format import DTYPE_BYTES, OLDER_IS_KEPT, StoredFile, hint_for
from trainyard.errors import CheckpointError
from trainyard.files import open_file, refuse_lfs_pointer

# Few files, each small enough to move.
SHARD_LIMIT_BYTES: Final = 2**30
_SMALL_SHARD_BYTES: Final = 2**26
# Two keep most disks busy; the others hash meanwhile.
THREADS: Final = 4
# Large, because each piece waits for the GIL, which a busy training loop releases every 5 ms.
_PIECE_BYTES = 8 * 2**20
# Values start at a page boundary.
_HEADER_ALIGNMENT_BYTES = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_HEADER_LIMIT_BYTES = 100_000_000
_XXH3_DIGITS, _SHA256_DIGITS = 32, 64
_TAKE_ANOTHER = "copy or download the file again"
Take = Callable[[int, Tensor], None]
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
    checksum: str = ""
    """By the file's header; empty if it has none."""


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Entry(msgspec.Struct):
    """A tensor's, or `__metadata__`."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)
    xxh3_128: str = ""


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


def limit_of_shards(n_bytes: int) -> int:
    """Returns a limit for the shards of `n_bytes` that keeps all threads writing until the end.

    Of several files a thread, the last ones end at about the same time.
    """
    return min(max(n_bytes // (2 * THREADS), _SMALL_SHARD_BYTES), SHARD_LIMIT_BYTES)


def write_shards(shards: Mapping[Path, Mapping[str, Tensor]]) -> dict[str, StoredFile]:
    """Writes files of named tensors; returns their entries, by name, once all are on disk.

    Copies GPU tensors and non-contiguous ones a few at a time.

    Raises:
        OSError: no space, or the disk cannot be written; leaves the files as they are.
    """
    for path in shards:
        path.unlink(missing_ok=True)  # not overwritten: tensors may be mapped from it

    def write(path: Path) -> StoredFile:
        return write_shard(path, shards[path], shards[path].__getitem__)

    pool = ThreadPoolExecutor(THREADS)
    try:
        written = pool.map(write, shards)
        return dict(zip((path.name for path in shards), written, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def read_header(path: Path, sha256: str = "") -> dict[str, Values]:
    """Reads where the tensors of a file are, in file order.

    They must fill it exactly, without gaps or overlaps.

    Args:
        path: the file.
        sha256: of its header with the length, in hex; empty: any.

    Raises:
        CheckpointError: it cannot be read, is not a safetensors file, or has another header.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            refuse_lfs_pointer(file, path, CheckpointError)
            length = file.read(8)
            n_bytes = int.from_bytes(length, "little")
            if n_bytes > min(size - 8, _HEADER_LIMIT_BYTES):
                raise _malformed(path, f"its header would have {n_bytes} bytes")
            header = file.read(n_bytes)
        if sha256 and hashlib.sha256(length + header).hexdigest() != sha256:
            what = f"the sha256 of its header is not {sha256}, as the manifest says"
            raise CheckpointError(f"{path} is damaged: {what}", OLDER_IS_KEPT)
        entries = msgspec.json.decode(header, type=dict[str, _Entry])
    except OSError as error:
        hint = hint_for(path.parent, _TAKE_ANOTHER)
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", hint) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(path, str(error)) from None
    checksums = entries.pop("__metadata__", _Entry()).xxh3_128
    found, filled = {}, 0
    in_order = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    for number, (name, entry) in enumerate(in_order):
        start, end = entry.data_offsets
        dtype = DTYPES.get(_CODES.get(entry.dtype, ""))
        if dtype is None or min(entry.shape, default=0) < 0:
            raise _malformed(path, f"{name!r} is {entry.dtype} {list(entry.shape)}")
        place = filled, filled + math.prod(entry.shape) * dtype.itemsize
        if (start, end) != place:
            what = f"{name!r}, {entry.dtype} {list(entry.shape)}"
            raise _malformed(path, f"{what} is at {start}:{end}, not at {place[0]}:{place[1]}")
        filled = end
        checksum = checksums[_XXH3_DIGITS * number : _XXH3_DIGITS * (number + 1)]
        found[name] = Values(path, dtype, entry.shape, 8 + n_bytes + start, end - start, checksum)
    if filled != size - 8 - n_bytes:
        raise _malformed(path, f"tensors have {filled} bytes of {size - 8 - n_bytes}")
    return found


def read_values(values: Values, into: Tensor | Take | None = None, like: str = "") -> str:
    """Reads the values of a tensor from disk and returns their checksum in hex.

    Args:
        values: where they are.
        into: filled with them; a contiguous CPU tensor of their type and number. Or it takes them a
            few rows at a time, each with the number of the first. Else they are only hashed.
        like: a checksum of the kind to return; empty: XXH3-128.

    Raises:
        CheckpointError: the disk fails, or the file is truncated.
    """
    digest = _begin_checksum(like)
    whole = _bytes_of(into) if isinstance(into, Tensor) else None
    row = max(1, values.n_bytes // max(1, (values.shape or (1,))[0]))
    most = max(1, _PIECE_BYTES // row) * row
    room = memoryview(bytearray(min(values.n_bytes, most))) if whole is None else whole
    try:
        with values.path.open("rb", buffering=0) as file:
            _read_ahead(file, values)
            for done in range(0, values.n_bytes, most):
                n_bytes = min(most, values.n_bytes - done)
                piece = room[:n_bytes] if whole is None else whole[done : done + n_bytes]
                _read_all(file, piece, values.start + done)
                digest.update(piece)
                if callable(into):
                    rows = torch.frombuffer(piece, dtype=torch.uint8).view(values.dtype)
                    into(done // row, rows.view(-1, *values.shape[1:]))
    except OSError as error:
        hint = hint_for(values.path.parent, _TAKE_ANOTHER)
        raise CheckpointError(f"{values.path} cannot be read: {error}", hint) from None
    return digest.hexdigest()


def write_shard(
    path: Path, outlines: Mapping[str, Tensor], make: Callable[[str], Tensor]
) -> StoredFile:
    """Writes and flushes one new file.

    Args:
        path: the file.
        outlines: types and shapes of its tensors, by name.
        make: returns one of them; called once for each, and the values are not kept.
    """
    # Wide types first, so that all are aligned to their width.
    tensors = dict(sorted(outlines.items(), key=lambda item: (-item[1].itemsize, item[0])))
    file = _DirectFile(path, len(_render_header(tensors, ["0" * _XXH3_DIGITS] * len(tensors))))
    try:
        header = _render_header(tensors, [file.append(make(name)) for name in tensors])
        file.flush(header)
    finally:
        file.close()
    return StoredFile(file.n_bytes, hashlib.sha256(header).hexdigest())


def _render_header(tensors: Mapping[str, Tensor], checksums: list[str]) -> bytes:
    """Returns the header of a file with these tensors in order."""
    entries: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        code, shape = _CODE_OF[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    # transformers requires the first.
    entries["__metadata__"] = {"format": "pt", "xxh3_128": "".join(checksums)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _begin_checksum(like: str = "") -> _Hash:
    """Starts a checksum of the same kind as `like`; XXH3-128 if that is empty."""
    return hashlib.sha256() if len(like) == _SHA256_DIGITS else xxhash.xxh3_128()


class _DirectFile:
    """A new file, written past the page cache if the file system allows it.

    Direct writes need aligned memory, positions and lengths: full buffers have all three. The rest
    of the file is written like any other.

    Args:
        path: of the file.
        start: room for its header in bytes.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._file = path.open("xb", buffering=0)
        self._buffer = np.frombuffer(mmap.mmap(-1, _PIECE_BYTES), np.uint8)
        self._n_gathered = 0
        self.n_bytes = start
        self._set_direct(True)

    def append(self, tensor: Tensor) -> str:
        """Writes the values of a tensor; returns their checksum."""
        digest = _begin_checksum()
        values = tensor.detach().reshape(-1)
        n_values = _PIECE_BYTES // values.itemsize
        for first in range(0, len(values), n_values):
            piece = values[first : first + n_values].cpu().view(torch.uint8).numpy()
            while len(piece):
                start = self._n_gathered
                part = self._buffer[start : start + len(piece)]
                np.copyto(part, piece[: len(part)])
                digest.update(part.data)
                piece = piece[len(part) :]
                self._n_gathered += len(part)
                if self._n_gathered == len(self._buffer):
                    self._write_gathered()
        return digest.hexdigest()

    def flush(self, header: bytes) -> None:
        """Writes the rest and the header, and waits until all is on disk."""
        self._set_direct(False)
        self._write_gathered()
        self._write(memoryview(header), 0)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write_gathered(self) -> None:
        self._write(self._buffer[: self._n_gathered].data, self.n_bytes)
        self.n_bytes += self._n_gathered
        self._n_gathered = 0

    def _write(self, piece: memoryview, start: int) -> None:
        while piece:
            try:
                n_bytes = os.pwrite(self._file.fileno(), piece, start)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    raise
                continue
            piece, start = piece[n_bytes:], start + n_bytes

    def _set_direct(self, direct: bool) -> bool:
        """Sets or clears O_DIRECT; returns whether that changed anything."""
        descriptor = self._file.fileno()
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        wanted = flags | _O_DIRECT if direct else flags & ~_O_DIRECT
        with suppress(OSError):  # a file system without it
            fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) != flags


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read_ahead(file: BinaryIO, values: Values) -> None:
    """Has the kernel read all of a tensor, where supported, while its first part is hashed."""
    with suppress(OSError, AttributeError):  # macOS has none
        os.posix_fadvise(file.fileno(), values.start, values.n_bytes, os.POSIX_FADV_WILLNEED)


def _read_all(file: BinaryIO, piece: memoryview, start: int) -> None:
    while piece:
        n_bytes = os.preadv(file.fileno(), [piece], start)
        if n_bytes == 0:
            raise OSError(f"it ends at byte {start}")
        piece, start = piece[n_bytes:], start + n_bytes


def _malformed(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a safetensors file: {why}", _TAKE_ANOTHER)
