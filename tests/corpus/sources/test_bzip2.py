"""Tests of the random access into .bz2: any cutting gives every block once; damage is named."""

from __future__ import annotations

import bz2
import random
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from tests.circles import everyday

from trainyard.corpus.sources.blocks import DamagedFileError, read_bzip2_blocks

# Level 1 makes blocks of 100 kB.
TEXT = b"".join(b"line %d of %d\n" % (n, n * n) for n in range(60_000))
FORMS = {
    "no block": lambda: bz2.compress(b""),
    "single stream": lambda: bz2.compress(TEXT, 1),
    "multistream": lambda: b"".join(
        bz2.compress(TEXT[n : n + 70_000], 9) for n in range(0, len(TEXT), 70_000)
    ),
    "streams of several blocks": lambda: (
        bz2.compress(TEXT[:500_000], 1) + bz2.compress(TEXT[500_000:], 2)
    ),
    "noise": lambda: bz2.compress(random.Random(1).randbytes(1_000_000), 3),
}


@cache
def compressed(form: str) -> bytes:
    return FORMS[form]()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of a single stream."""
    path = tmp_path / "a.bz2"
    path.write_bytes(compressed("single stream"))
    return path


def read_own(path: Path, start: int, end: int) -> tuple[bytes, int]:
    chunks = list(takewhile(lambda chunk: chunk.is_own, read_bzip2_blocks(path, start, end)))
    return b"".join(chunk.data for chunk in chunks), sum(chunk.n_bytes for chunk in chunks)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("n_pieces", everyday((1, 2, 3, 20), (3,)))
def test_any_cutting_gives_every_block_once(path: Path, name: str, n_pieces: int) -> None:
    path.write_bytes(compressed(name))
    size = path.stat().st_size
    cuts = [0, *sorted(random.Random(n_pieces).choices(range(size), k=n_pieces - 1)), size]
    pieces = [read_own(path, *cuts[n : n + 2]) for n in range(n_pieces)]
    assert b"".join(data for data, _ in pieces) == bz2.decompress(compressed(name))
    assert size - 1000 <= sum(n_bytes for _, n_bytes in pieces) <= size
    chunks = list(read_bzip2_blocks(path, 0, 10))  # what follows is read on demand
    assert b"".join(chunk.data for chunk in chunks) == bz2.decompress(compressed(name))
    assert {chunk.n_bytes for chunk in chunks[1:]} <= {0}


def test_damage_is_named(path: Path) -> None:
    data = bytearray(compressed("multistream"))
    second = data.find(b"BZh9", 4)
    data[second + 1000] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(
        DamagedFileError, match=rf"^byte {second + 4}: this bzip2 block is corrupt$"
    ):
        read_own(path, 0, len(data))
    # Pieces that do not hold the damage are as they were.
    third = data.find(b"BZh9", second + 4)
    assert read_own(path, third, len(data))[0] == TEXT[140_000:]
    path.write_bytes(compressed("multistream")[: third + 500])
    with pytest.raises(
        DamagedFileError, match=rf"^byte {third + 4}: the file is cut short in this"
    ):
        read_own(path, 0, third + 500)
    path.write_bytes(b"PK\3\4 is not it")
    with pytest.raises(DamagedFileError, match=r"^byte 0: this is not a bzip2 file$"):
        read_own(path, 0, 10)


def test_memory_is_bounded_where_no_block_ends(path: Path) -> None:
    path.write_bytes(compressed("single stream")[:100] + bytes(5_000_000))
    with pytest.raises(
        DamagedFileError, match=r"^byte 4: a bzip2 block begins here and does not end$"
    ):
        read_own(path, 0, 5_000_100)
