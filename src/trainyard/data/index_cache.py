"""Keeps built order arrays on disk, under a key that changes whenever the data does.

The key of an array is a hash of everything it is computed from. The data enters as the checksums of
its two files, not as their names: a corpus may be moved, but not replaced unnoticed. `prepare`
writes the checksums beside the corpus, in `<prefix>.json`:

    {"bin": {"size_bytes": 10, "sha256": "..."}, "idx": {"size_bytes": 82, "sha256": "..."}, ...}

They are believed if the sizes are right and the files are not newer. Else both files are read once;
the result is remembered in the cache folder until a file's size, time of change or inode changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

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
            stored = np.load(path, mmap_mode="r", allow_pickle=False)
            size_bytes = path.stat().st_size
        except (OSError, ValueError, EOFError):
            return None
        if not isinstance(stored, np.memmap) or (stored.shape, stored.dtype) != (shape, dtype):
            return None
        return np.asarray(stored) if stored.offset + stored.nbytes == size_bytes else None

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
        checksums = _load_sidecar(prefix) or self._remembered_checksums(prefix, self.folder)
        return hashlib.sha256(json.dumps(checksums).encode()).hexdigest()

    def _remembered_checksums(self, prefix: str, folder: Path) -> list[str]:
        paths = token_paths(prefix)
        states = [_state(path) for path in paths]
        name = hashlib.sha256(os.path.realpath(prefix).encode()).hexdigest()[:32]
        memory = folder / f"content-{name}.json"
        remembered = _load_json(memory)
        if remembered.get("states") == states:
            return [str(checksum) for checksum in remembered["sha256"]]
        if paths[0].stat().st_size > _LARGE_BYTES:
            logging.getLogger("trainyard").info("reading %s once, to know it again", paths[0])
        checksums = [_checksum(path) for path in paths]
        with _replacing(memory) as file:
            file.write(json.dumps({"states": states, "sha256": checksums}).encode())
        return checksums


def _load_sidecar(prefix: str) -> list[str] | None:
    """Gives the checksums that `prepare` wrote, if they still describe the files."""
    sidecar = Path(f"{prefix}.json")
    record = _load_json(sidecar)
    checksums = []
    for path in token_paths(prefix):
        entry = record.get(path.suffix[1:])
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            return None
        status = path.stat()
        if status.st_size != entry.get("size_bytes"):
            return None
        if status.st_mtime_ns > sidecar.stat().st_mtime_ns:
            return None
        checksums.append(entry["sha256"])
    return checksums


def _load_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that takes the name `path` when it is complete and on the disk."""
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
            partial = Path(file.name)
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
        if partial is not None:
            partial.unlink(missing_ok=True)
