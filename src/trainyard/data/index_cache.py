"""Keeps built order arrays on disk, under a key that changes whenever the data does.

The key of an array is a hash of everything it is computed from. The data enters as the checksums of
its two files, not as their names: a corpus may be moved, but not replaced unnoticed. `prepare`
writes checksums beside the corpus, block by block, in `<prefix>.json`:

    {"bin": {"blocks": [[10, "..."]]}, "idx": {"blocks": [[82, "..."]]}, ...}

They are believed if the sizes are right and the files are not newer. Else both files are read once,
in the same blocks, so that the same bytes have the same checksum either way; the result is
remembered in the cache folder until a file's size, time of change or inode changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainyard.config.reading import open_file, parse_json, read_file
from trainyard.data.file_record import BLOCK_BYTES, Block, FileRecord
from trainyard.data.indexed import token_paths
from trainyard.errors import MachineError

FORMAT_VERSION = 1
_LARGE_BYTES = 4 << 30

Array = NDArray[Any]


class IndexCache:
    """Arrays by name in a folder, memory-mapped; without a folder, arrays in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def key(self, **inputs: object) -> str:
        """Hashes what an array is computed from."""
        text = json.dumps({"format": FORMAT_VERSION, **inputs}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def load(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """Maps a stored array; None if it is not there, or damaged in kind or size."""
        if self.folder is None:
            return None
        path = self.folder / f"{name}.npy"
        try:
            with open_file(path) as file:
                version = np.lib.format.read_magic(file)
                found = np.lib.format.read_array_header_1_0(file) if version == (1, 0) else None
                offset, size_bytes = file.tell(), os.fstat(file.fileno()).st_size
        except (OSError, ValueError, TypeError, RecursionError, MemoryError):
            return None  # no header, or one that only looks like it
        expected_bytes = offset + math.prod(shape) * dtype.itemsize
        if found != (shape, False, dtype) or size_bytes != expected_bytes:
            return None
        return np.asarray(np.memmap(path, dtype, "r", offset, shape))

    def save(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], slabs: Iterable[Array]
    ) -> Array:
        """Stores an array that comes in slabs along its first axis, and gives it back mapped.

        Raises:
            MachineError: the disk is full or the folder cannot be written.
        """
        if self.folder is None:
            return np.concatenate([slab.astype(dtype, copy=False) for slab in slabs])
        path = self.folder / f"{name}.npy"
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        with _replacing(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for slab in slabs:
                file.write(np.ascontiguousarray(slab, dtype).data)
        stored = self.load(name, shape, dtype)
        assert stored is not None, f"{path} does not hold {shape} of {dtype}"
        return stored

    def fingerprint(self, prefix: str) -> str:
        """Hashes the content of token files: of both, every byte.

        Without a folder nothing is stored, so nothing is read either.
        """
        if self.folder is None:
            return ""
        record = _load_record(prefix)
        if record is not None and _is_older(prefix):
            checksums = [file.sha256 for file in record.files]
        else:
            checksums = self._remembered_checksums(prefix, self.folder, record)
        return hashlib.sha256(json.dumps(checksums).encode()).hexdigest()

    def _remembered_checksums(self, prefix: str, folder: Path, record: _Record | None) -> list[str]:
        paths = token_paths(prefix)
        files = (None, None) if record is None else record.files
        sizes = [[] if file is None else [block.n_bytes for block in file.blocks] for file in files]
        states = [[*_state(path), *cut] for path, cut in zip(paths, sizes, strict=True)]
        name = hashlib.sha256(os.path.realpath(prefix).encode()).hexdigest()[:32]
        memory = folder / f"content-{name}.json"
        remembered = _load_json(memory)
        if remembered.get("states") == states:
            return [str(checksum) for checksum in remembered["sha256"]]
        if paths[0].stat().st_size > _LARGE_BYTES:
            logging.getLogger("trainyard").info("reading %s once, to know it again", paths[0])
        checksums = [_checksum(path, cut) for path, cut in zip(paths, sizes, strict=True)]
        with _replacing(memory) as file:
            file.write(json.dumps({"states": states, "sha256": checksums}).encode())
        return checksums


class _Record(msgspec.Struct):
    """The part of `<prefix>.json` that is needed here."""

    bin: FileRecord
    idx: FileRecord

    @property
    def files(self) -> tuple[FileRecord, FileRecord]:
        return self.bin, self.idx


def _load_record(prefix: str) -> _Record | None:
    """Reads the checksums that `prepare` wrote, if there are any and the sizes are right."""
    try:
        record = msgspec.json.decode(read_file(Path(f"{prefix}.json")), type=_Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    fits = all(
        path.stat().st_size == file.size_bytes and all(block.n_bytes > 0 for block in file.blocks)
        for path, file in zip(token_paths(prefix), record.files, strict=True)
    )
    return record if fits else None


def _is_older(prefix: str) -> bool:
    """Whether the token files were last changed before their record was."""
    record_ns = Path(f"{prefix}.json").stat().st_mtime_ns
    return all(path.stat().st_mtime_ns <= record_ns for path in token_paths(prefix))


def _load_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _checksum(path: Path, sizes: list[int]) -> str:
    """Reads a file in blocks of these sizes, or of 16 MiB, and gives their common checksum."""
    size_bytes = path.stat().st_size
    blocks = []
    with path.open("rb") as file:
        for n_bytes in sizes or _equal_blocks(size_bytes):
            digest = hashlib.sha256()
            for done_bytes in range(0, n_bytes, BLOCK_BYTES):
                digest.update(file.read(min(BLOCK_BYTES, n_bytes - done_bytes)))
            blocks.append(Block(n_bytes, digest.hexdigest()))
    return FileRecord(blocks).sha256


def _equal_blocks(size_bytes: int) -> list[int]:
    return [min(BLOCK_BYTES, size_bytes - first) for first in range(0, size_bytes, BLOCK_BYTES)]


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that takes the name `path` when it is complete and on the disk."""
    # A name of its own, since others may write the same; open() makes it readable as umask says.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise MachineError(
            f"{path}: {error.strerror}",
            "free space or quota, or give a cache folder that can be written",
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()
