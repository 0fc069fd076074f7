"""The bytes of a plain or compressed file, a few MiB at a time."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

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
