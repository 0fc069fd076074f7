"""Caches order arrays on disk, under a key that changes with the data.

The key of an array is a hash of all its inputs. The data enters as the checksums of its two files,
not as their names: a corpus may move, but a replacement is detected. `prepare` writes checksums
next to the corpus, block by block, in `<prefix>.json` (`sidecar.py`).

They are trusted if the sizes match and the files did not change after the record. Otherwise both
files are read once, in the same blocks, for the same checksums; the cache folder keeps the result
until a file's size, time of change or inode changes. Ranks that start together share this work
(`training/context.py`).

What is stored here is never trusted either: a stored array ends with the SHA-256 of its name and
values, a remembered result contains its own. A damaged file is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data.indexed import FileState, file_state, map_array, read_sizes, token_paths
from trainyard.data.sidecar import Sidecar, load_sidecar
from trainyard.errors import DataError, explain_failure
from trainyard.files import (
    BLOCK_BYTES,
    BlockChecksum,
    FileRecord,
    open_file,
    read_file,
    replacing,
    seal,
    unseal,
)

FORMAT_VERSION = 1
_DIGEST_BYTES = hashlib.sha256().digest_size

_log = logging.getLogger("trainyard")

Array = NDArray[Any]
Stored = tuple[str, tuple[int, ...], np.dtype[Any]]
"""Name, shape and dtype of an array."""


@dataclass(frozen=True)
class FileBlock:
    """Consecutive bytes of a file."""

    path: Path
    first: int
    n_bytes: int

    def read_digest(self, prefix: bytes = b"") -> bytes:
        """Reads the bytes; returns the SHA-256 of the prefix and them."""
        digest = hashlib.sha256(prefix)
        with self.path.open("rb") as file:
            file.seek(self.first)
            for done_bytes in range(0, self.n_bytes, BLOCK_BYTES):
                digest.update(file.read(min(BLOCK_BYTES, self.n_bytes - done_bytes)))
        return digest.digest()


@dataclass(frozen=True)
class Unread:
    """Token files whose content is not known before they are read; made by `look_up`."""

    memory: Path
    """What then remembers it."""
    paths: tuple[Path, Path]
    states: list[list[int]]
    """For each file its size, time of change and inode, and the sizes of recorded blocks."""
    blocks: list[FileBlock]


@dataclass(eq=False)
class IndexCache:
    """Arrays by name in a folder, memory-mapped.

    Args:
        folder: where the arrays are.
        checks: whether to read stored arrays whole and compare their checksums. One of the ranks
            that see the same files does.
        trusted: states of the .idx files that need no check.

    Attributes:
        loaded: the size, time of change and inode of the file of each array that was loaded or
            saved, by name, and its checksum in hexadecimal.
    """

    folder: Path
    checks: bool = field(default=True, kw_only=True)
    trusted: Container[FileState] = field(default=(), kw_only=True)
    loaded: dict[str, tuple[FileState, str]] = field(default_factory=dict, init=False)

    def key(self, **inputs: object) -> str:
        """Hashes what an array is computed from."""
        text = json.dumps({"format": FORMAT_VERSION, **inputs}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def load_or_build(
        self, key: str, arrays: Sequence[Stored], build: Callable[[], Iterable[Iterable[Array]]]
    ) -> list[Array]:
        """Maps the arrays of a key; where one is missing or damaged, stores all of them anew.

        Args:
            key: of what they are computed from.
            arrays: each by its name, shape and dtype.
            build: yields the slabs of each along its first axis, one array after another.

        Raises:
            MachineError: the disk is full or the folder cannot be written.
        """
        named = [(f"{key}-{name}", shape, dtype) for name, shape, dtype in arrays]
        loaded = [self.load(*array) for array in named]
        found = [array for array in loaded if array is not None]
        if len(found) == len(named):
            return found
        return [self.save(*array, slabs) for array, slabs in zip(named, build(), strict=True)]

    def save(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], slabs: Iterable[Array]
    ) -> Array:
        """Stores an array from slabs along its first axis, and returns it memory-mapped.

        Raises:
            MachineError: the disk is full or the folder cannot be written.
        """
        path, digest = self.folder / f"{name}.npy", hashlib.sha256(name.encode())
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        with _write(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for slab in slabs:
                values = np.ascontiguousarray(slab, dtype).reshape(-1)
                file.write(values.data)
                digest.update(values.data)
            file.write(digest.digest())
        stored = self.load(name, shape, dtype, checks=False)
        assert stored is not None, f"{path} does not hold {shape} of {dtype}"
        return stored

    def load(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, checks: bool = True
    ) -> Array | None:
        """Maps a stored array; None if it is not there, or damaged; `checks`: if the cache does."""
        path = self.folder / f"{name}.npy"
        try:
            with open_file(path) as file:
                version = np.lib.format.read_magic(file)
                header = np.lib.format.read_array_header_1_0(file) if version == (1, 0) else None
                offset, n_bytes = file.tell(), math.prod(shape) * dtype.itemsize
                state = file_state(os.fstat(file.fileno()))
                if header != (shape, False, dtype) or state[0] != offset + n_bytes + _DIGEST_BYTES:
                    return None
                file.seek(-_DIGEST_BYTES, os.SEEK_END)
                digest = file.read(_DIGEST_BYTES)
                values = FileBlock(path, offset, n_bytes)
                if self.checks and checks and values.read_digest(name.encode()) != digest:
                    _log.warning("%s is damaged: its checksum is wrong; it is made anew", path)
                    return None
        except (OSError, ValueError, TypeError, RecursionError, MemoryError):
            return None  # no header, or one that only looks like it
        self.loaded[name] = (state, digest.hex())
        return map_array(path, dtype, shape, offset)

    def fingerprint(self, prefix: str) -> str:
        """Hashes the content of token files: of both, every byte."""
        checksums = self.look_up(prefix)
        if isinstance(checksums, Unread):
            digests = [block.read_digest() for block in checksums.blocks]
            checksums = self.remember(checksums, digests)
        return hashlib.sha256(json.dumps(checksums).encode()).hexdigest()

    def remember(self, unread: Unread, digests: Sequence[bytes]) -> list[str]:
        """Stores block checksums from reading; returns the checksums of both files.

        Raises:
            MachineError: the disk is full or the folder cannot be written.
        """
        blocks: dict[Path, list[BlockChecksum]] = {path: [] for path in unread.paths}
        for block, digest in zip(unread.blocks, digests, strict=True):
            blocks[block.path].append(BlockChecksum(block.n_bytes, digest.hex()))
        checksums = [FileRecord(of_file).sha256 for of_file in blocks.values()]
        content = {"states": unread.states, "sha256": checksums}
        with _write(unread.memory) as file:
            file.write(seal(json.dumps(content).encode()))
        return checksums

    def look_up(self, prefix: str) -> list[str] | Unread:
        """Returns the checksums of both files, or what must be read for them.

        Raises:
            DataError: a file is missing, or the header is damaged.
        """
        read_sizes(prefix)
        record = _load_record(prefix)
        if record is not None and _is_older(prefix):
            return [record.bin.sha256, record.idx.sha256]
        paths = token_paths(prefix)
        sizes: list[list[int]] = [[], []]
        if record is not None:
            sizes = [[block.n_bytes for block in file.blocks] for file in (record.bin, record.idx)]
        states = [[*file_state(path.stat()), *cut] for path, cut in zip(paths, sizes, strict=True)]
        name = hashlib.sha256(os.path.realpath(prefix).encode()).hexdigest()[:32]
        memory = self.folder / f"content-{name}.json"
        with suppress(OSError, ValueError):
            remembered = json.loads(unseal(read_file(memory)))
            if remembered["states"] == states:
                return [str(checksum) for checksum in remembered["sha256"]]
        blocks = []
        for path, cut, (size_bytes, *_) in zip(paths, sizes, states, strict=True):
            starts = [0, *accumulate(cut[:-1])] if cut else range(0, size_bytes, BLOCK_BYTES)
            for first, end in pairwise([*starts, size_bytes]):
                blocks.append(FileBlock(path, first, end - first))
        return Unread(memory, paths, states, blocks)


def describe_contents(prefix: str) -> str:
    """Identifies token files without reading them: by their record's checksums, or their sizes.

    Raises:
        DataError: a file is missing, or the header is damaged.
    """
    bin_bytes, (dtype, *counts) = read_sizes(prefix)
    record = _load_record(prefix)
    if record is None:
        return str([bin_bytes, dtype.name, *counts])
    return str([record.bin.sha256, record.idx.sha256])


def _load_record(prefix: str) -> Sidecar | None:
    """Reads the record that `prepare` wrote, if there is one and it fits the token files."""
    try:
        record = load_sidecar(prefix)
        record.check_sizes(prefix)
    except DataError:
        return None
    blocks = [*record.bin.blocks, *record.idx.blocks]
    return record if all(block.n_bytes > 0 for block in blocks) else None


def _is_older(prefix: str) -> bool:
    """Whether the token files were last changed before their record was."""
    record_ns = Path(f"{prefix}.json").stat().st_ctime_ns
    return all(path.stat().st_ctime_ns <= record_ns for path in token_paths(prefix))


def _write(path: Path) -> AbstractContextManager[IO[bytes]]:
    """Opens a file of the cache, and makes its folder; others may write the same at once."""
    hint = "give a cache folder that can be written"
    with explain_failure(f"{path} cannot be written", hint):
        path.parent.mkdir(parents=True, exist_ok=True)
    return replacing(path, hint, f".{secrets.token_hex(8)}")
