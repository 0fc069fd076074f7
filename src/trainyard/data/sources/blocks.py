"""The bytes of a plain or compressed file, a few MiB at a time."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

import zstandard

from trainyard.data.sources.files import Segment, format_of

BLOCK_BYTES = 4 * 2**20
# Small, because one chunk of repetitive text can grow a thousandfold when it is unpacked.
_CHUNK_BYTES = 64 * 2**10
# Text shrinks by 3 to 10, repetitive logs by 100; a file made to fill disks, by 1,000 and more.
_BOMB_RATIO = 500
_BOMB_BYTES = 2**30


class DamagedFileError(Exception):
    """A file is cut short or corrupt; everything before the damage was handed over."""


class _Decompressor(Protocol):
    def decompress(self, data: bytes, /) -> bytes: ...
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


def _build_decompressor(compression: str) -> _Decompressor:
    build: dict[str, Callable[[], _Decompressor]] = {
        ".gz": lambda: zlib.decompressobj(wbits=31),
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lzma.LZMADecompressor,
        ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),
    }
    return build[compression]()


def read_blocks(segment: Segment) -> Iterator[tuple[bytes, int]]:
    """Yields blocks of unpacked bytes, each with the bytes of the file it took (for progress).

    Raises:
        DamagedFileError: after the last good byte of a truncated or corrupt compressed file.
    """
    found = format_of(segment.path)
    assert found is not None, "find_files lets only known formats through"
    with segment.path.open("rb") as file:
        if found[1]:
            yield from _unpack(file, found[1])
            return
        file.seek(segment.start)
        left = segment.end - segment.start
        while left and (block := file.read(min(BLOCK_BYTES, left))):
            left -= len(block)
            yield block, len(block)


def _unpack(file: BinaryIO, compression: str) -> Iterator[tuple[bytes, int]]:
    ready: list[bytes] = []
    taken = unpacked = 0
    try:
        for piece in _unpack_frames(file, compression):
            unpacked += len(piece)
            if unpacked > max(_BOMB_BYTES, _BOMB_RATIO * file.tell()):
                raise EOFError(f"it unpacks to more than {_BOMB_RATIO} times its size")
            ready.append(piece)
            if sum(map(len, ready)) >= BLOCK_BYTES:
                yield b"".join(ready), file.tell() - taken
                ready, taken = [], file.tell()
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError, OSError) as error:
        yield b"".join(ready), file.tell() - taken
        raise DamagedFileError(str(error)) from error
    yield b"".join(ready), file.tell() - taken


def _unpack_frames(file: BinaryIO, compression: str) -> Iterator[bytes]:
    """Unpacks one frame after another, as `cat a.gz b.gz` makes them."""
    decompressor, inside_frame = _build_decompressor(compression), False
    while chunk := file.read(_CHUNK_BYTES):
        while chunk:
            inside_frame = True
            yield decompressor.decompress(chunk)
            if not decompressor.eof:
                break
            # Tapes and some tools pad a file with zero bytes after its last frame.
            chunk = decompressor.unused_data.lstrip(b"\0")
            decompressor, inside_frame = _build_decompressor(compression), False
    if inside_frame:
        raise EOFError("the file ends in the middle of the compressed data")
