"""Checks one block of a token file: its checksum, its ids, and the ends of its documents.

Ids may cross block boundaries, so a block owns the ids whose first byte is in it:

    bytes    0 1 2 | 3 4 5 | 6 7      blocks of 3 bytes, ids of 2
    ids      0 0 1 | 1 2 2 | 3 3      the first block owns ids 0 and 1 and reads byte 3 too
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainyard.data.indexed import Array, IndexedDataset

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Span:
    """Bytes of an open file that are read together, and the checksum they shall have."""

    path: Path
    file_descriptor: int
    first: int
    n_bytes: int
    sha256: str | None

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.first + self.n_bytes


@dataclass
class BlockErrors:
    """What is wrong within a span; places are counted in tokens of the whole .bin."""

    error: str = ""
    differs: bool = False
    bad_ids: list[tuple[int, int]] = field(default_factory=list)
    """Place and value of the first bad id of each piece."""
    n_bad_ids: int = 0
    bad_ends: list[tuple[int, int]] = field(default_factory=list)
    """Document and last id of the first of each piece that does not end as it should."""
    n_bad_ends: int = 0


class BlockChecker:
    """Looks at the bytes of one span at a time; any number of threads may call it."""

    def __init__(
        self, dataset: IndexedDataset | None, vocabulary_size: int | None, eod_id: int | None
    ) -> None:
        self.dataset = dataset
        self.vocabulary_size = vocabulary_size
        self.eod_id = eod_id

    def check(self, span: Span) -> BlockErrors:
        """Reads a span and compares it with its checksum and with the rules for ids."""
        finding = BlockErrors()
        checksum = hashlib.sha256()
        dataset = self.dataset if span.path.suffix == ".bin" else None
        itemsize = dataset.dtype.itemsize if dataset is not None else 1
        for start in range(span.first, span.end, _PIECE_BYTES):
            n_bytes = min(_PIECE_BYTES, span.end - start)
            try:  # a block may end within an id, so the rest of that id is read too
                data = os.pread(span.file_descriptor, n_bytes + itemsize - 1, start)
            except OSError as error:
                finding.error = error.strerror or str(error)
                return finding
            if len(data) < n_bytes:
                finding.error = "truncated while being read"
                return finding
            if span.sha256 is not None:
                checksum.update(memoryview(data)[:n_bytes])
            if dataset is not None:
                first = -(-start // itemsize)
                last = min(-(-(start + n_bytes) // itemsize), dataset.n_tokens)
                if first < last:
                    skipped = first * itemsize - start
                    ids = np.frombuffer(data, dataset.dtype, last - first, skipped)
                    self._check_ids(ids, first, finding)
                    self._check_ends(dataset, ids, first, finding)
        finding.differs = span.sha256 is not None and checksum.hexdigest() != span.sha256
        return finding

    def _check_ids(self, ids: Array, first: int, finding: BlockErrors) -> None:
        limit = self.vocabulary_size
        if (limit is None or ids.max() < limit) and (ids.dtype.kind == "u" or ids.min() >= 0):
            return
        bad = ids < 0 if limit is None else (ids < 0) | (ids >= limit)
        at = int(np.argmax(bad))
        finding.bad_ids.append((first + at, int(ids[at])))
        finding.n_bad_ids += int(np.count_nonzero(bad))

    def _check_ends(
        self, dataset: IndexedDataset, ids: Array, first: int, finding: BlockErrors
    ) -> None:
        """Looks at the last id of each document that ends within `ids`, the tokens from `first`."""
        if self.eod_id is None:
            return
        itemsize, last = dataset.dtype.itemsize, first + len(ids)
        pointers, entries = dataset.sequence_pointers, dataset.document_indices
        # Sequences that start after `first`, up to `last`: a document ends where one starts.
        low, high = (
            bisect_right(pointers, first * itemsize),
            bisect_right(pointers, last * itemsize),
        )
        starts = pointers[low:high] // itemsize
        if last == dataset.n_tokens:
            starts = np.append(starts, last)
        begin, end = bisect_left(entries, low), bisect_left(entries, low + len(starts))
        # Empty documents share their end with the one before them, which is the first at that end.
        ends, where = np.unique(starts[entries[begin:end] - low], return_index=True)
        found = ids[ends - 1 - first]
        bad = found != self.eod_id
        if bad.any():
            at = int(np.argmax(bad))
            finding.bad_ends.append((begin + int(where[at]) - 1, int(found[at])))
            finding.n_bad_ends += int(np.count_nonzero(bad))


def sequence_of(dataset: IndexedDataset, token: int) -> int:
    """Finds the sequence that holds a token of the .bin."""
    return bisect_right(dataset.sequence_pointers, token * dataset.dtype.itemsize) - 1


def document_of(dataset: IndexedDataset, sequence: int) -> int:
    """Finds the document that holds a sequence."""
    return bisect_right(dataset.document_indices, sequence) - 1
