"""The bytes of a plain or compressed file, a few MiB at a time; of `.bz2` also from any byte on.

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
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from trainyard.corpus.sources.files import Segment, format_of

BLOCK_BYTES = 4 * 2**20
_CHUNK_BYTES = 64 * 2**10
# The most that is unpacked at once: a chunk of a file made to fill memory grows to gigabytes.
_PIECE_BYTES = 2**20
# Text shrinks by 3 to 10, repetitive logs by 100; a file made to fill disks, by 1,000 and more.
_BOMB_RATIO = 500
_BOMB_BYTES = 2**30
_CUT_SHORT = "the file ends in the middle of the compressed data"
# Corrupt bzip2 data is an OSError, as if the disk had failed.
_CORRUPT_ERRORS = (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError, OSError)
_BLOCK_MAGIC = 0x314159265359
_END_MAGIC = 0x177245385090
_MAGIC_BITS = 48
_BZIP2_READ_BYTES = 256 * 2**10
# A block of random bytes is a little longer than its 900 kB.
_MAX_BZIP2_BLOCK_BYTES = 2 * 2**20


class DamagedFileError(Exception):
    """A file is cut short or corrupt; everything before the damage was handed over.

    Args:
        problem: what is wrong.
        suspect_from: the byte of the unpacked data from which on what was handed over may be wrong,
            because the checksum behind it does not fit; None where all of it is right.
    """

    def __init__(self, problem: str, suspect_from: int | None = None) -> None:
        super().__init__(problem)
        self.suspect_from = suspect_from


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    # Left to guess, it takes zero bytes for an empty file of an older format.
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
}


def read_blocks(segment: Segment) -> Iterator[tuple[bytes, int]]:
    """Yields blocks of unpacked bytes, each with the bytes of the file it took (for progress).

    Raises:
        DamagedFileError: after the last good byte of a truncated or corrupt compressed file.
    """
    _, compression = format_of(segment.path)
    with segment.path.open("rb") as file:
        if compression:
            yield from _unpack(file, compression)
            return
        file.seek(segment.start)
        left = segment.end - segment.start
        while left and (block := file.read(min(BLOCK_BYTES, left))):
            left -= len(block)
            yield block, len(block)


def find_damage(segment: Segment) -> DamagedFileError | None:
    """Unpacks a file to its end, where its checksum is, and gives what is wrong with it."""
    try:
        for _ in read_blocks(segment):
            pass
    except DamagedFileError as error:
        return error
    return None


def _unpack(file: BinaryIO, compression: str) -> Iterator[tuple[bytes, int]]:
    ready: list[bytes] = []
    n_ready = taken = unpacked = 0
    build = _DECOMPRESSORS.get(compression)
    try:
        for piece in _unpack_frames(file, build) if build else _unpack_zst(file):
            unpacked += len(piece)
            if unpacked > max(_BOMB_BYTES, _BOMB_RATIO * file.tell()):
                raise DamagedFileError(f"it unpacks to more than {_BOMB_RATIO} times its size")
            ready.append(piece)
            n_ready += len(piece)
            if n_ready >= BLOCK_BYTES:
                yield b"".join(ready), file.tell() - taken
                ready, n_ready, taken = [], 0, file.tell()
    except DamagedFileError:
        yield b"".join(ready), file.tell() - taken
        raise
    yield b"".join(ready), file.tell() - taken


def _decompress(decompressor: Any, data: bytes) -> Iterator[bytes]:
    """Yields what data unpacks to, a piece at a time, up to the end of the frame."""
    while True:
        if piece := decompressor.decompress(data, _PIECE_BYTES):
            yield piece
        # Input for which there was no room: zlib returns it, the others keep it.
        data = getattr(decompressor, "unconsumed_tail", b"")
        if decompressor.eof or (not data and getattr(decompressor, "needs_input", True)):
            return


def _unpack_frames(file: BinaryIO, build: Callable[[], Any]) -> Iterator[bytes]:
    """Unpacks one frame after another, as `cat a.gz b.gz` makes them."""
    decompressor = None  # of the frame that has begun
    n_frames = start = n_before = n_out = 0  # the frame's start, bytes unpacked before and of it
    while chunk := file.read(_CHUNK_BYTES):
        while chunk:
            if decompressor is None:
                # Tapes and some tools pad a file with zero bytes after its last frame.
                chunk = chunk.lstrip(b"\0") if n_frames else chunk
                if not chunk:
                    break
                decompressor, n_frames = build(), n_frames + 1
                start, n_before, n_out = file.tell() - len(chunk), n_before + n_out, 0
            try:
                for piece in _decompress(decompressor, chunk):
                    n_out += len(piece)
                    yield piece
            except _CORRUPT_ERRORS as error:
                yield from _unpack_to_damage(file, build(), start, n_out)
                raise DamagedFileError(str(error), n_before) from error
            chunk = b""
            if decompressor.eof:
                chunk, decompressor = decompressor.unused_data, None
    if decompressor is not None:
        raise DamagedFileError(_CUT_SHORT)


def _unpack_to_damage(
    file: BinaryIO, decompressor: Any, start: int, n_known: int
) -> Iterator[bytes]:
    """Unpacks a damaged frame again and yields what follows its first `n_known` bytes.

    A call that meets the damage gives nothing of what it unpacked before, so those near it take a
    byte each.
    """
    chunk_start = file.tell() - _CHUNK_BYTES
    n_out = 0
    file.seek(start)
    while data := file.read(max(1, min(chunk_start - file.tell(), _CHUNK_BYTES))):
        try:
            for piece in _decompress(decompressor, data):
                n_out += len(piece)
                new = min(n_out - n_known, len(piece))
                if new > 0:
                    yield piece[-new:]
        except _CORRUPT_ERRORS:
            return


def _unpack_zst(file: BinaryIO) -> Iterator[bytes]:
    """Unpacks one frame after another; zstandard itself would unpack a chunk whole."""
    n_before = n_out = 0
    zero = b""
    while start := file.read(1):
        if start == zero:
            continue
        zero = b"\0"  # the padding that may stand behind a frame
        n_before, n_out = n_before + n_out, 0
        frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
        for part in _cut_zst_frame(start + file.read(3), file):
            try:
                piece = frame.decompress(part)
            except zstandard.ZstdError as error:
                raise DamagedFileError(str(error), n_before) from error
            n_out += len(piece)
            if piece:
                yield piece
        if not frame.eof:
            raise DamagedFileError(_CUT_SHORT)


def _cut_zst_frame(magic: bytes, file: BinaryIO) -> Iterator[bytes]:
    """Yields the parts of a frame, none of which unpacks to more than 128 KiB (RFC 8878, 3.1)."""
    if int.from_bytes(magic, "little") >> 4 == 0x184D2A5:  # it holds no data
        length = file.read(4)
        yield magic + length
        left = int.from_bytes(length, "little")
        while left and (data := file.read(min(left, _CHUNK_BYTES))):
            left -= len(data)
            yield data
        return
    descriptor = file.read(1)
    flags = int.from_bytes(descriptor, "little")
    is_single = flags >> 5 & 1
    n_sizes = (is_single, 2, 4, 8)[flags >> 6] + (0, 1, 2, 4)[flags & 3] + 1 - is_single
    yield magic + descriptor + file.read(n_sizes)
    while header := file.read(3):
        block = int.from_bytes(header, "little")
        is_one_byte_repeated = block >> 1 & 3 == 1
        yield header + file.read(1 if is_one_byte_repeated else block >> 3)
        if block & 1:
            break
    if flags & 4:
        yield file.read(4)  # the checksum


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


# What the whole bytes inside a magic number look like at each of the 8 bit offsets.
_PATTERNS = [
    (shift, magic, (magic >> shift & (2**40 - 1)).to_bytes(5, "big"))
    for magic in (_BLOCK_MAGIC, _END_MAGIC)
    for shift in range(8)
]


def read_bzip2_blocks(path: Path, start: int, end: int) -> Iterator[UnpackedChunk]:
    """Yields the blocks that begin in bytes [start, end), then, as long as asked, those behind.

    Raises:
        DamagedFileError: a block is corrupt or cut short, or the file is no bzip2 file.
    """
    with path.open("rb") as file:
        if start == 0 and file.read(3) != b"BZh":
            raise DamagedFileError("byte 0: this is not a bzip2 file")
        yield from _read_bzip2(file, start, end)


def _read_bzip2(file: BinaryIO, start: int, end: int) -> Iterator[UnpackedChunk]:
    buffer = b""
    base = start  # the byte of the file that `buffer` begins with
    searched = start * 8  # no magic number before this bit is unknown
    block: int | None = None  # the bit that the block being read begins with
    file.seek(start)
    while more := file.read(_BZIP2_READ_BYTES):
        buffer += more
        for magic in _find_magics(buffer, base, searched):
            if block is not None:
                data = _unpack_bzip2(buffer, block - base * 8, magic.bit - base * 8, block // 8)
                is_own = block // 8 < end
                yield UnpackedChunk(data, magic.bit // 8 - block // 8 if is_own else 0, is_own)
            block = magic.bit if magic.is_block else None
            searched = magic.bit + 1
        searched = max(searched, (base + len(buffer)) * 8 - _MAGIC_BITS + 1)
        done = max((searched if block is None else block) // 8 - base, 0)
        buffer, base = buffer[done:], base + done
        if len(buffer) > _MAX_BZIP2_BLOCK_BYTES:
            raise DamagedFileError(f"byte {base}: a bzip2 block begins here and does not end")
    if block is not None:
        raise DamagedFileError(f"byte {block // 8}: the file is cut short in this bzip2 block")


def _find_magics(buffer: bytes, base: int, searched: int) -> list[_Magic]:
    """Lists the magic numbers of `buffer` from bit `searched` of the file on, in order."""
    magics: list[_Magic] = []
    for shift, magic, pattern in _PATTERNS:
        # The magic number ends `shift` bits before the end of the byte behind the pattern's last,
        # or, without a shift, with the pattern itself; its first byte stands before the pattern.
        position = max(searched // 8 - base, 0)
        while (position := buffer.find(pattern, position)) >= 0:
            bit = (position + 5) * 8 + shift - _MAGIC_BITS
            position += 1
            if bit >= 0 and base * 8 + bit >= searched and _bits(buffer, bit, 48) == magic:
                magics.append(_Magic(base * 8 + bit, magic == _BLOCK_MAGIC))
    return sorted(magics)


def _bits(buffer: bytes, start: int, n_bits: int) -> int:
    """Returns bits [start, start + n_bits) as a number; -1 if the buffer ends earlier."""
    end = start + n_bits
    last = -(-end // 8)
    if last > len(buffer):
        return -1
    value = int.from_bytes(buffer[start // 8 : last], "big") >> (last * 8 - end)
    return value & ((1 << n_bits) - 1)


def _unpack_bzip2(buffer: bytes, start: int, end: int, byte: int) -> bytes:
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
