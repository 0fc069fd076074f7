"""Record of a written file: its size and the checksums of its blocks.

    with Path("corpus.bin").open("wb") as file:
        checked = BlockWriter(file)
        checked.write(data)
    FileRecord(checked.close_block())       # blocks of about 16 MiB, to locate damage

Blocks end between two writes, so a file joined from parts keeps their blocks, and need not be read
again.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import msgspec

BLOCK_BYTES = 16 * 2**20


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Consecutive bytes of a file and their checksum."""

    n_bytes: int
    sha256: str


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that was written, block by block from its first byte on."""

    blocks: list[Block]

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
        self.blocks: list[Block] = []
        self._digest = hashlib.sha256()
        self._n_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Writes bytes; an OSError of the file goes through."""
        self.file.write(data)
        self._digest.update(data)
        self._n_bytes += memoryview(data).nbytes
        if self._n_bytes >= BLOCK_BYTES:
            self.close_block()

    def close_block(self) -> list[Block]:
        """Ends the block here, and returns all so far."""
        if self._n_bytes:
            self.blocks.append(Block(self._n_bytes, self._digest.hexdigest()))
            self._digest, self._n_bytes = hashlib.sha256(), 0
        return self.blocks
