"""Files that survive hostile input and full disks: reading, publishing, recording checksums.

Reading takes only ordinary files, up to a size limit: a pipe would block, a device would never end,
and a million brackets would crash the interpreter. Each raises an error that callers already
handle, an OSError or a ValueError.

A record of a written file lists its size and the checksums of its blocks:

    with Path("corpus.bin").open("wb") as file:
        checked = BlockWriter(file)
        checked.write(data)
    FileRecord(checked.close_block())       # blocks of about 16 MiB, to locate damage

Blocks end between two writes, so a file joined from parts keeps their blocks, and need not be read
again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from trainyard.errors import SPACE, MachineError, UserError, explain_failure

FILE_LIMIT_BYTES = 2**30
SETTINGS_LIMIT_BYTES = 16 * 2**20
BLOCK_BYTES = 16 * 2**20


_LFS_POINTER = b"version https://git-lfs.github.com/"


def refuse_lfs_pointer(file: BinaryIO, path: Path, error: type[UserError]) -> None:
    """Raises `error` if an open file is not itself but Git LFS's pointer to it."""
    if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
        raise error(f"{path} is a pointer of Git LFS, not the file itself", "git lfs pull")
    file.seek(0)


def open_file(path: Path) -> BinaryIO:
    """Opens an ordinary file, or a link to one, for reading.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    # Opening a pipe without a writer would block forever.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return file


def read_file(path: Path, limit_bytes: int = FILE_LIMIT_BYTES) -> bytes:
    """Reads a whole ordinary file.

    Raises:
        OSError: as `open_file`, or it has more bytes than the limit.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > limit_bytes:
            problem = f"larger than {limit_bytes:,} bytes, which no such file is"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """Reads JSON.

    Raises:
        ValueError: it is none, is not text, or nests too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


@contextmanager
def replacing(path: Path, hint: str, mark: str = "") -> Iterator[BinaryIO]:
    """Opens a file that takes the name `path` when it is complete and on the disk.

    Args:
        path: its name.
        hint: the alternative to more space on the disk.
        mark: distinguishes it from others that are written under this name at the same time.

    Raises:
        MachineError: the disk is full or the folder cannot be written.
    """
    partial = path.with_name(f"{path.name}{mark}.partial")
    try:
        with explain_failure(f"{path} cannot be written", f"{SPACE}, or {hint}"):
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        with suppress(OSError):  # a read-only file system refuses this even for a missing file
            partial.unlink()


def publish_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file under a temporary name beside it, then renames it.

    Raises:
        MachineError: the disk is full or the folder cannot be written.
    """
    with replacing(path, "choose another folder; then run the same command again") as file:
        file.write(text.encode())


def seal(content: bytes) -> bytes:
    """Ends a small file with the checksum of its content, for `unseal`."""
    return content + b"\n" + hashlib.sha256(content).hexdigest().encode()


def unseal(sealed: bytes) -> bytes:
    """Returns what `seal` was given.

    Raises:
        ValueError: something else is there.
    """
    content, _, checksum = sealed.rpartition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != checksum:
        raise ValueError("its checksum is wrong")
    return content


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Converts an OSError of writing `path` to a MachineError with the bytes written."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"{path}: {error.strerror} after {path.stat().st_size if path.exists() else 0:,} bytes",
            f"{SPACE}, or write to another folder; then run the same command again",
        ) from error


def flush(path: Path) -> None:
    """Flushes a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BlockChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Consecutive bytes of a file and their checksum."""

    n_bytes: int
    sha256: str


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that was written, block by block from its first byte on."""

    blocks: list[BlockChecksum]

    @property
    def size_bytes(self) -> int:
        """What the blocks add up to."""
        return sum(block.n_bytes for block in self.blocks)

    @property
    def sha256(self) -> str:
        """One checksum over those of all blocks."""
        text = "".join(f"{block.n_bytes} {block.sha256}\n" for block in self.blocks)
        return hashlib.sha256(text.encode()).hexdigest()


class BlockWriter:
    """Writes to a file and keeps the checksums of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.blocks: list[BlockChecksum] = []
        self._digest = hashlib.sha256()
        self._n_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Writes bytes; an OSError of the file goes through."""
        self.file.write(data)
        self._digest.update(data)
        self._n_bytes += memoryview(data).nbytes
        if self._n_bytes >= BLOCK_BYTES:
            self.close_block()

    def close_block(self) -> list[BlockChecksum]:
        """Ends the block here, and returns all so far."""
        if self._n_bytes:
            self.blocks.append(BlockChecksum(self._n_bytes, self._digest.hexdigest()))
            self._digest, self._n_bytes = hashlib.sha256(), 0
        return self.blocks
