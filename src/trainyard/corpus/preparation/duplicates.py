"""Finds exact and near duplicates of earlier documents, in corpora of any size.

Any number of processes tokenize the units of a corpus, and store a few 64-bit keys per document.
Afterwards any number of them compare the keys of all units, in corpus order, one band each:

    np.save("unit-7.keys.npy", document_keys(step, texts))               # while tokenizing
    for band, columns in enumerate(compared_columns(step)):              # afterwards
        ends = find_repeats(columns, [.., "unit-7.keys.npy", ..], f"{band}.mask")
    np.memmap("3.mask", bool)[ends[7] : ends[8]]     # True for each document of unit 7 whose key
                                                     # in band 3 stood before

A document is dropped if it shares a key with any earlier document, dropped or not:

    document            1        2        3        4
    keys of its bands   a b      a c      d c      e f
    dropped                      (a)      (c)

So the result depends only on the order of the corpus. (Keys belong to one band: an `a` in the first
band never equals one in the second.)

Near duplicates share a band of a MinHash signature over runs of words: "to be or not" has, as runs
of three words, "to be or" and "be or not". Broder, "On the resemblance and containment of
documents", 1997; Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", chapter 3.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import rensa

from trainyard.config.corpus import Deduplicate, NearDeduplicate
from trainyard.corpus.preparation.steps import ALONE, WORD, code_points, kinds_of

Hashes = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# Characters that are looked at together: few for a cache, many for the cost of a call of numpy.
_PIECE_CHARACTERS = 1 << 17
# Rensa starts a thread for every core above 2^16 at once, and there is a process for each already.
_RUNS_PER_CALL = 1 << 15
# Files open at a time; some systems allow no more than 256.
_PARTITIONS_PER_PASS = 128


def document_keys(step: Deduplicate | NearDeduplicate, texts: Sequence[str]) -> Hashes:
    """Computes what documents are compared by; equal on every machine.

    A document shorter than a run of words is one run; one without any word is as a whole one run,
    so that only its copies are like it.

    Returns:
        (documents, columns): two columns that are one hash of 128 bits, or a column for each band.
        A column is contiguous in memory, and in a file by np.save.
    """
    if isinstance(step, Deduplicate):
        digests = b"".join(_digest(text, 16) for text in texts)
        keys = np.frombuffer(digests, "<u8").reshape(len(texts), 2)
        return np.asfortranarray(keys.astype(np.uint64, copy=False))
    words, n_words = _hash_words(texts)
    runs, n_runs = _hash_runs(words, n_words, step.words)
    signatures = _sign(runs, n_runs, step).reshape(len(texts), step.bands, step.rows)
    keys = np.tile(np.arange(1, step.bands + 1, dtype=np.uint64), (len(texts), 1))
    for row in range(step.rows):
        keys = _mix(keys * _MULTIPLIER + signatures[:, :, row])
    return np.asfortranarray(keys)


def compared_columns(step: Deduplicate | NearDeduplicate) -> list[list[int]]:
    """Lists the columns of a step's keys that make one key: any of these shared is a repeat."""
    return [[0, 1]] if isinstance(step, Deduplicate) else [[band] for band in range(step.bands)]


def find_repeats(
    columns: list[int],
    key_files: Sequence[Path],
    mask_file: Path,
    memory_bytes: int = 256 * 2**20,
) -> Counts:
    """Finds the documents that share a key with an earlier one.

    Args:
        columns: of the keys that are compared, together.
        key_files: the keys of each unit, as np.save writes them, in the order of the corpus.
        mask_file: becomes one byte for each document of the corpus: whether it repeats another.
            Beside it, up to 24 bytes for each document are written for the time of the call.
        memory_bytes: about what may be used, however many documents there are.

    Returns:
        Where the documents of each unit begin in `mask_file`, and last where they end.
    """
    n_documents = [len(np.load(file, mmap_mode="r")) for file in key_files]
    ends = np.cumsum([0, *n_documents])
    total = int(ends[-1])
    with mask_file.open("wb") as file:
        # Taken now: a full disk met later, through the mapping, would kill the process.
        os.posix_fallocate(file.fileno(), 0, max(total, 1))
    repeats = np.memmap(mask_file, np.bool_, "r+", shape=max(total, 1))
    for numbers in _find_in_columns(key_files, columns, mask_file.parent, memory_bytes, total):
        repeats[numbers] = True
    repeats.flush()
    return ends


def _digest(text: str, n_bytes: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=n_bytes).digest()


def _mix(values: Hashes) -> Hashes:
    """Spreads every bit over all 64, one to one (the finalizer of MurmurHash3)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def _hash_words(texts: Sequence[str]) -> tuple[Hashes, Counts]:
    """Hashes every word of every document: (words), and how many each document has."""
    n_words = np.zeros(len(texts), np.int64)
    words_of_pieces = [np.empty(0, np.uint64)]
    for numbers, pieces in _cut(texts):
        hashes, piece_of_word = _hash_words_of_pieces(pieces)
        words_of_pieces.append(hashes)
        n_words += np.bincount(np.array(numbers)[piece_of_word], minlength=len(texts))
    words = np.concatenate(words_of_pieces)
    wordless = np.flatnonzero(n_words == 0)
    whole = [int.from_bytes(_digest(texts[number], 8), "little") for number in wordless.tolist()]
    words = np.insert(words, np.cumsum(n_words)[wordless], np.array(whole, np.uint64))
    return words, np.maximum(n_words, 1)


def _cut(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Returns documents, in lower case, a few at a time; a long one in several pieces."""
    numbers, pieces, n_characters = list[int](), list[str](), 0
    for number, text in enumerate(texts):
        lower = text.lower()
        for start in range(0, len(lower), _PIECE_CHARACTERS):
            numbers.append(number)
            pieces.append(lower[start : start + _PIECE_CHARACTERS])
            n_characters += len(pieces[-1])
            if n_characters >= _PIECE_CHARACTERS:
                yield numbers, pieces
                numbers, pieces, n_characters = [], [], 0
    if pieces:
        yield numbers, pieces


def _hash_words_of_pieces(pieces: list[str]) -> tuple[Hashes, Counts]:
    """Hashes every word, and returns its piece; the hash is a polynomial of its letters."""
    codes = code_points("\n".join(pieces))
    kinds = kinds_of(codes)
    in_word = (kinds & WORD) != 0
    alone = (kinds & ALONE) != 0
    begins = in_word.copy()
    begins[1:] &= ~in_word[:-1] | alone[1:] | alone[:-1]
    letters = np.flatnonzero(in_word)
    starts = np.flatnonzero(begins[letters])
    if not len(starts):
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    lengths = np.diff(starts, append=len(letters))
    index_in_word = np.arange(len(letters)) - np.repeat(starts, lengths)
    powers = np.cumprod(np.full(lengths.max(), _MULTIPLIER))
    sums = np.add.reduceat(codes[letters].astype(np.uint64) * powers[index_in_word], starts)
    ends = np.cumsum([len(piece) + 1 for piece in pieces])
    return _mix(sums), np.searchsorted(ends, letters[starts], side="right")


def _hash_runs(words: Hashes, n_words: Counts, length: int) -> tuple[Hashes, Counts]:
    """Hashes every run of `length` words inside a document; zeros fill up a shorter document."""
    lacking = np.maximum(length - n_words, 0)
    words = np.insert(words, np.repeat(np.cumsum(n_words), lacking), 0)
    n_words = n_words + lacking
    n_starts = max(len(words) - length + 1, 0)
    hashes = np.zeros(n_starts, np.uint64)
    for offset in range(length):
        hashes *= _MULTIPLIER
        hashes += words[offset : offset + n_starts]
    inside = np.ones(n_starts, np.bool_)  # not where a run continues into the next document
    for offset in range(1, length):
        inside[np.cumsum(n_words)[:-1] - offset] = False
    return _mix(hashes[inside]), n_words - length + 1


def _sign(runs: Hashes, n_runs: Counts, step: NearDeduplicate) -> npt.NDArray[np.uint32]:
    """Computes MinHash signatures: (documents, bands x rows)."""
    size = step.bands * step.rows
    signatures = np.empty((len(n_runs), size), np.uint32)
    ends = np.cumsum(n_runs)
    start = 0
    while start < len(n_runs):
        before = int(ends[start] - n_runs[start])
        end = max(int(np.searchsorted(ends, before + _RUNS_PER_CALL, side="right")), start + 1)
        offsets = np.concatenate([[before], ends[start:end]]) - before
        matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
            runs[before : ends[end - 1]], offsets.astype(np.uint64), num_perm=size, seed=step.seed
        )
        signatures[start:end] = matrix.to_rows()
        start = end
    return signatures


def _find_in_columns(
    key_files: Sequence[Path], columns: list[int], folder: Path, memory_bytes: int, total: int
) -> Generator[npt.NDArray[np.int64]]:
    """Yields the numbers, in the corpus, of documents whose key stood before.

    Keys are first divided by their top bits into files that fit the memory, then each file is
    sorted. Thus the keys are read once, not once for every memoryful.
    """
    width = len(columns) + 1
    # At the peak a record is in memory as read, joined with those seen, sorted, and in the order.
    records = max(memory_bytes // (40 * width), 1)
    n_partitions = 1 + total * 4 // (records * 3)  # a quarter more, as they differ in size
    for first in range(0, n_partitions, _PARTITIONS_PER_PASS):
        last = min(first + _PARTITIONS_PER_PASS, n_partitions)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            files = [Path(scratch) / str(number) for number in range(first, last)]
            with ExitStack() as stack:
                opened = [stack.enter_context(file.open("wb")) for file in files]
                for rows in _read_keys(key_files, columns, records):
                    partition = ((rows[:, 0] >> np.uint64(32)) * n_partitions) >> np.uint64(32)
                    order = np.argsort(partition, kind="stable")
                    bounds = np.searchsorted(partition[order], np.arange(first, last + 1))
                    for file, (start, end) in zip(opened, pairwise(bounds), strict=True):
                        file.write(rows[order[start:end]].tobytes())
            for path in files:
                yield from _find_in_file(path, width, records)


def _read_keys(
    key_files: Sequence[Path], columns: list[int], records: int
) -> Iterator[npt.NDArray[np.uint64]]:
    """Yields at most `records` documents at a time: their keys, and last their numbers."""
    before = 0
    for path in key_files:
        keys = np.load(path, mmap_mode="r")
        for start in range(0, len(keys), records):
            some = keys[start : start + records, columns]
            numbers = np.arange(before + start, before + start + len(some), dtype=np.uint64)
            yield np.column_stack([some, numbers])
        before += len(keys)


def _find_in_file(path: Path, width: int, records: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the numbers of documents whose key stood before in a file of records.

    The file is larger than the memory only if keys repeat, so all different keys fit.
    """
    seen = np.empty((0, width), np.uint64)
    with path.open("rb") as file:
        while len(block := np.fromfile(file, np.uint64, records * width)):
            rows = np.concatenate([seen, block.reshape(-1, width)])
            rows = rows[np.lexsort(rows[:, :-1].T)]  # stable, so the earliest comes first
            repeats = np.zeros(len(rows), np.bool_)
            repeats[1:] = (rows[1:, :-1] == rows[:-1, :-1]).all(axis=1)
            yield rows[repeats, -1].astype(np.int64)
            seen = rows[~repeats]
