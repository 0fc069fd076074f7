"""Decompresses a `.bz2` file from any byte on, so that processes can split a file.

A bzip2 file is one or more streams of blocks. A block starts at any bit with a magic number, holds
up to 900 kB of text and is independent of earlier blocks:

    BZh9 | magic, checksum, data | magic, checksum, data | end magic, checksum | BZh9 | magic ...

Between a header and an end marker, a block is a complete stream that the standard library
decompresses and checks. A range of the file owns the blocks whose first bit is in it, so any split
of a file yields every block once. A magic number also occurs by chance, once in about 2**47 bits of
data (900 dumps of the English Wikipedia); then the block is reported as damaged.
"""

from __future__ import annotations

import bz2
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainyard.corpus.sources.blocks import DamagedFileError

_BLOCK_MAGIC = 0x314159265359
_END_MAGIC = 0x177245385090
_MAGIC_BITS = 48
_READ_BYTES = 256 * 2**10
# A block of random bytes is a little longer than its 900 kB.
_MAX_BLOCK_BYTES = 2 * 2**20


class UnpackedChunk(NamedTuple):
    """Unpacked bytes, and how many bytes of the range they took.

    A chunk that is not `is_own` lies behind the range that was asked for; its `n_bytes` is 0.
    """

    data: bytes
    n_bytes: int
    is_own: bool


class _Magic(NamedTuple):
    bit: int  # of the file
    is_block: bool


def _build_patterns() -> list[tuple[int, bool, bytes]]:
    """Lists what the whole bytes inside a magic number look like at each of the 8 bit offsets."""
    return [
        (shift, is_block, (magic >> shift & (2**40 - 1)).to_bytes(5, "big"))
        for magic, is_block in ((_BLOCK_MAGIC, True), (_END_MAGIC, False))
        for shift in range(8)
    ]


_PATTERNS = _build_patterns()


def read_bzip2_blocks(path: Path, start: int, end: int) -> Iterator[UnpackedChunk]:
    """Yields the blocks that begin in bytes [start, end), then, as long as asked, those behind.

    Raises:
        DamagedFileError: a block is corrupt or cut short, or the file is no bzip2 file.
    """
    with path.open("rb") as file:
        if start == 0 and file.read(3) != b"BZh":
            raise DamagedFileError("byte 0: this is not a bzip2 file")
        yield from _read_blocks(file, start, end)


def _read_blocks(file: BinaryIO, start: int, end: int) -> Iterator[UnpackedChunk]:
    buffer = b""
    base = start  # the byte of the file that `buffer` begins with
    searched = start * 8  # no magic number before this bit is unknown
    block: int | None = None  # the bit that the block being read begins with
    file.seek(start)
    while more := file.read(_READ_BYTES):
        buffer += more
        for magic in _find_magics(buffer, base, searched):
            if block is not None:
                data = _unpack(buffer, block - base * 8, magic.bit - base * 8, block // 8)
                is_own = block // 8 < end
                yield UnpackedChunk(data, magic.bit // 8 - block // 8 if is_own else 0, is_own)
            block = magic.bit if magic.is_block else None
            searched = magic.bit + 1
        searched = max(searched, (base + len(buffer)) * 8 - _MAGIC_BITS + 1)
        done = max((searched if block is None else block) // 8 - base, 0)
        buffer, base = buffer[done:], base + done
        if len(buffer) > _MAX_BLOCK_BYTES:
            raise DamagedFileError(f"byte {base}: a bzip2 block begins here and does not end")
    if block is not None:
        raise DamagedFileError(f"byte {block // 8}: the file is cut short in this bzip2 block")


def _find_magics(buffer: bytes, base: int, searched: int) -> list[_Magic]:
    """Lists the magic numbers of `buffer` from bit `searched` of the file on, in order."""
    found: list[_Magic] = []
    for shift, is_block, pattern in _PATTERNS:
        magic = _BLOCK_MAGIC if is_block else _END_MAGIC
        # The magic number ends `shift` bits before the end of the byte behind the pattern's last,
        # or, without a shift, with the pattern itself; its first byte stands before the pattern.
        position = max(searched // 8 - base, 0)
        while (position := buffer.find(pattern, position)) >= 0:
            bit = (position + 5) * 8 + shift - _MAGIC_BITS
            position += 1
            if bit >= 0 and base * 8 + bit >= searched and _bits(buffer, bit, 48) == magic:
                found.append(_Magic(base * 8 + bit, is_block))
    return sorted(found)


def _bits(buffer: bytes, start: int, n_bits: int) -> int:
    """Returns bits [start, start + n_bits) as a number; -1 if the buffer ends earlier."""
    end = start + n_bits
    last = -(-end // 8)
    if last > len(buffer):
        return -1
    value = int.from_bytes(buffer[start // 8 : last], "big") >> (last * 8 - end)
    return value & ((1 << n_bits) - 1)


def _unpack(buffer: bytes, start: int, end: int, byte: int) -> bytes:
    """Unpacks the block in bits [start, end) of `buffer`; `byte` of the file is for the message."""
    checksum = _bits(buffer, start + _MAGIC_BITS, 32)
    block = (_bits(buffer, start, end - start) << 80) | (_END_MAGIC << 32) | checksum
    n_bits = end - start + 80
    padding = -n_bits % 8
    stream = b"BZh9" + (block << padding).to_bytes((n_bits + padding) // 8, "big")
    try:
        return bz2.decompress(stream)
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"byte {byte}: this bzip2 block is corrupt") from error
