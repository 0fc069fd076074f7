"""Compares token files with their record, byte for byte, and locates differences.

    report = check_data("data/web_text_document")
    report.tokens, report.has_record

raises a DataError that lists every problem, such as

    data/web_text_document.bin: bytes 16777216 to 33554431 differ from what was written (sequences
    9120 to 18003, documents 9121 to 18004)
    data/web_text_document.bin: ids outside the vocabulary (0 to 50256): 3; the first is 60000:
    token 12 of sequence 9600 (document 9601)

Two threads read both files once, front to back, with constant memory. If the checksums match, only
the writer can be wrong; checks of counts, ids and document ends detect that too, and cover files
without a record.
"""

from __future__ import annotations

import errno
import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainyard.data.indexed import Array, IndexedDataset, token_paths
from trainyard.data.sidecar import Sidecar, load_sidecar
from trainyard.data.tokenizer import Tokenizer
from trainyard.errors import DataError, refuse_problems
from trainyard.files import BLOCK_BYTES, BlockChecksum, open_file

# Takes bytes done and bytes in all.
Progress = Callable[[int, int], None]

_THREADS = 2
_PIECE_BYTES = 4 << 20
_SLAB = 1 << 20  # documents looked at together


@dataclass(frozen=True)
class DataReport:
    """What was found good.

    Attributes:
        n_bytes: the size of both files.
        n_blocks: blocks whose checksum was compared.
        vocabulary_size: what the ids were compared with; None: only their sign was looked at.
        ends_checked: whether every document that is not empty ends with the end of document.
        has_record: without one, nothing vouches for the bytes.
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    n_bytes: int
    n_blocks: int
    vocabulary_size: int | None
    ends_checked: bool
    has_record: bool


@dataclass(frozen=True)
class Span:
    """Bytes of a file that are read together, and their expected checksum."""

    path: Path
    first: int
    n_bytes: int
    sha256: str | None

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.first + self.n_bytes


class BadTokens(NamedTuple):
    """Tokens of a span that break a rule: how many, and the place and the id of the first."""

    n_tokens: int
    place: int
    first_id: int


@dataclass
class BlockErrors:
    """What is wrong within a span; ids are located by token, ends by document."""

    error: str = ""
    differs: bool = False
    bad_ids: list[BadTokens] = field(default_factory=list)
    bad_ends: list[BadTokens] = field(default_factory=list)


@dataclass(frozen=True)
class BlockChecker:
    """Checks the bytes of one span at a time; any number of threads may call it.

    Ids may cross the borders of blocks, so a block owns the ids whose first byte is in it:

        bytes    0 1 2 | 3 4 5 | 6 7      blocks of 3 bytes, ids of 2
        ids      0 0 1 | 1 2 2 | 3 3      the first block owns ids 0 and 1 and reads byte 3 too
    """

    dataset: IndexedDataset | None
    vocabulary_size: int | None
    eod_id: int | None

    def check(self, span: Span) -> BlockErrors:
        """Reads a span and compares it with its checksum and with the rules for ids."""
        errors = BlockErrors()
        checksum = hashlib.sha256()
        dataset = self.dataset if span.path.suffix == ".bin" else None
        itemsize = dataset.dtype.itemsize if dataset is not None else 1
        try:
            with open_file(span.path) as file:
                for start in range(span.first, span.end, _PIECE_BYTES):
                    n_bytes = min(_PIECE_BYTES, span.end - start)
                    # A block may end within an id, so the rest of that id is read too.
                    data = os.pread(file.fileno(), n_bytes + itemsize - 1, start)
                    if len(data) < n_bytes:
                        raise OSError(errno.EIO, "truncated while being read")
                    if span.sha256 is not None:
                        checksum.update(memoryview(data)[:n_bytes])
                    if dataset is not None:
                        self._check_tokens(dataset, data, start, n_bytes, errors)
        except OSError as error:
            errors.error = error.strerror or str(error)
            return errors
        errors.differs = span.sha256 is not None and checksum.hexdigest() != span.sha256
        return errors

    def _check_tokens(
        self, dataset: IndexedDataset, data: bytes, start: int, n_bytes: int, errors: BlockErrors
    ) -> None:
        """Checks the ids whose first byte is among the first `n_bytes` of `data`."""
        itemsize = dataset.dtype.itemsize
        first = -(-start // itemsize)
        last = min(-(-(start + n_bytes) // itemsize), dataset.n_tokens)
        if first >= last:
            return
        ids = np.frombuffer(data, dataset.dtype, last - first, first * itemsize - start)
        limit = self.vocabulary_size
        is_signed = ids.dtype.kind == "i"
        if (is_signed and ids.min() < 0) or (limit is not None and ids.max() >= limit):
            is_bad = ids < 0 if limit is None else (ids < 0) | (ids >= limit)
            errors.bad_ids += _count_bad(is_bad, ids, lambda at: first + at)
        if self.eod_id is not None:
            errors.bad_ends += self._check_ends(dataset, ids, first)

    def _check_ends(self, dataset: IndexedDataset, ids: Array, first: int) -> list[BadTokens]:
        """Checks the last id of each document that ends within `ids`, the tokens from `first`."""
        itemsize, last = dataset.dtype.itemsize, first + len(ids)
        pointers, entries = dataset.sequence_pointers, dataset.document_indices
        # Sequences that start after `first`, up to `last`: a document ends where one starts.
        low, high = (bisect_right(pointers, token * itemsize) for token in (first, last))
        starts = pointers[low:high] // itemsize
        if last == dataset.n_tokens:
            starts = np.append(starts, last)
        begin, end = bisect_left(entries, low), bisect_left(entries, low + len(starts))
        # Empty documents share their end with the one before them, which is the first at that end.
        ends, where = np.unique(starts[entries[begin:end] - low], return_index=True)
        last_ids = ids[ends - 1 - first]
        return _count_bad(last_ids != self.eod_id, last_ids, lambda at: begin + int(where[at]) - 1)


def _count_bad(is_bad: Array, ids: Array, locate: Callable[[int], int]) -> list[BadTokens]:
    if not is_bad.any():
        return []
    at = int(np.argmax(is_bad))
    return [BadTokens(int(np.count_nonzero(is_bad)), locate(at), int(ids[at]))]


def check_data(
    prefix: str | Path, tokenizer: Tokenizer | None = None, progress: Progress | None = None
) -> DataReport:
    """Reads every byte of token files and compares them with their record and with each other.

    Args:
        prefix: the path without `.bin`, `.idx` or `.json`.
        tokenizer: compared with the one that made the ids.
        progress: told how far the reading has come.

    Raises:
        DataError: lists what is missing, damaged or wrong, and where.
    """
    prefix = str(prefix)
    problems: list[str] = []
    record = None
    if Path(f"{prefix}.json").exists():
        try:
            record = load_sidecar(prefix)
        except DataError as error:
            problems.append(error.problem)
    dataset = _open_dataset(prefix, problems)
    if record is not None:
        _check_record(record, dataset, tokenizer, Path(f"{prefix}.json"), problems)
    made_by = record.tokenizer if record is not None else tokenizer
    checker = BlockChecker(
        dataset,
        made_by.vocabulary_size if made_by is not None else None,
        record.tokenizer.eod_id if record is not None and record.append_eod else None,
    )
    spans = list(_list_spans(prefix, record, problems))
    _check_spans(spans, checker, problems, progress)
    hint = "copy .bin, .idx and .json again from where they were made, or prepare the data again"
    refuse_problems(prefix, list(dict.fromkeys(problems)), DataError, hint)
    assert dataset is not None, "a missing data set is a problem"
    return DataReport(
        prefix=prefix,
        documents=len(dataset.document_indices) - 1,
        sequences=len(dataset),
        tokens=dataset.n_tokens,
        n_bytes=sum(span.n_bytes for span in spans),
        n_blocks=sum(span.sha256 is not None for span in spans),
        vocabulary_size=checker.vocabulary_size,
        ends_checked=checker.eod_id is not None,
        has_record=record is not None,
    )


def _open_dataset(prefix: str, problems: list[str]) -> IndexedDataset | None:
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        problems.append(error.problem)
        return None
    bin_path, idx_path = token_paths(prefix)
    size_bytes = bin_path.stat().st_size
    described_bytes = dataset.n_tokens * dataset.dtype.itemsize
    if size_bytes > described_bytes:
        problems.append(
            f"{bin_path}: {size_bytes} bytes, but {idx_path.name} describes only {described_bytes}"
        )
    return dataset


def _check_record(
    record: Sidecar,
    dataset: IndexedDataset | None,
    tokenizer: Tokenizer | None,
    path: Path,
    problems: list[str],
) -> None:
    """Compares the record, in `path`, with the files and the tokenizer."""
    made_by = record.tokenizer
    if dataset is not None:
        counted = {
            "documents": len(dataset.document_indices) - 1,
            "empty_documents": _count_empty_documents(dataset),
            "sequences": len(dataset),
            "tokens": dataset.n_tokens,
            "dtype": dataset.dtype.name,
        }
        problems += [
            f"{path}: {name} is {getattr(record, name)}, the files have {value}"
            for name, value in counted.items()
            if getattr(record, name) != value
        ]
    if not 0 <= made_by.eod_id < made_by.vocabulary_size:
        problems.append(
            f"{path}: eod_id {made_by.eod_id} is outside the vocabulary of "
            f"{made_by.vocabulary_size} tokens"
        )
    if tokenizer is None:
        return
    try:
        record.check_against(tokenizer.name, tokenizer.fingerprint, path.with_suffix(""))
    except DataError as error:
        problems.append(error.problem)
        return
    problems += [
        f"{path}: {name} is {recorded}, the tokenizer {tokenizer.name} has {value}"
        for name in ("vocabulary_size", "eod_id")
        if (recorded := getattr(made_by, name)) != (value := getattr(tokenizer, name))
    ]


def _count_empty_documents(dataset: IndexedDataset) -> int:
    entries = dataset.document_indices
    slabs = (entries[first : first + _SLAB + 1] for first in range(0, len(entries) - 1, _SLAB))
    return sum(int(np.count_nonzero(np.diff(slab) == 0)) for slab in slabs)


def _list_spans(prefix: str, record: Sidecar | None, problems: list[str]) -> Iterator[Span]:
    """Divides both files as the record does."""
    files = (None, None) if record is None else (record.bin, record.idx)
    for path, written in zip(token_paths(prefix), files, strict=True):
        try:
            with open_file(path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        blocks: list[BlockChecksum] = []
        if written is not None:
            if written.size_bytes != size_bytes:
                problems.append(
                    f"{path}: {size_bytes} bytes, but {written.size_bytes} were written: "
                    + ("cut short" if size_bytes < written.size_bytes else "something was added")
                )
            if all(block.n_bytes > 0 for block in written.blocks):
                blocks = written.blocks
            else:
                problems.append(f"{prefix}.json: the blocks of {path.name} have sizes below 1")
        first = 0
        for block in blocks:
            if first + block.n_bytes > size_bytes:
                break
            yield Span(path, first, block.n_bytes, block.sha256)
            first += block.n_bytes
        for start in range(first, size_bytes, BLOCK_BYTES):  # no whole block covers these
            n_bytes = min(BLOCK_BYTES, size_bytes - start)
            yield Span(path, start, n_bytes, None)


def _check_spans(
    spans: list[Span], checker: BlockChecker, problems: list[str], progress: Progress | None
) -> None:
    """Checks all spans and describes what is wrong."""
    total_bytes, done_bytes = sum(span.n_bytes for span in spans), 0
    damaged: list[list[Span]] = []
    in_all = BlockErrors()
    with ThreadPoolExecutor(_THREADS) as pool:
        for span, errors in zip(spans, pool.map(checker.check, spans), strict=True):
            if errors.error:
                place = f"{span.path}: bytes {span.first} to {span.end - 1}"
                problems.append(f"{place}: {errors.error}")
            if errors.differs:
                last = damaged[-1][-1] if damaged else None
                if last is None or (last.path, last.end) != (span.path, span.first):
                    damaged.append([])
                damaged[-1].append(span)
            in_all.bad_ids += errors.bad_ids
            in_all.bad_ends += errors.bad_ends
            done_bytes += span.n_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    problems += [_describe_damage(run, checker.dataset) for run in damaged]
    if checker.dataset is not None:
        problems += _describe_tokens(in_all, checker, checker.dataset)


def _describe_damage(run: list[Span], dataset: IndexedDataset | None) -> str:
    """Describes which bytes differ, with their sequences and documents."""
    path, first, last = run[0].path, run[0].first, run[-1].end - 1
    text = f"{path}: bytes {first} to {last} differ from what was written"
    if path.suffix != ".bin" or dataset is None or not dataset.n_tokens:
        return text
    itemsize = dataset.dtype.itemsize
    tokens = [min(byte // itemsize, dataset.n_tokens - 1) for byte in (first, last)]
    sequences = [_sequence_of(dataset, token) for token in tokens]
    documents = [_document_of(dataset, sequence) for sequence in sequences]
    return (
        f"{text} (sequences {sequences[0]} to {sequences[1]}, "
        f"documents {documents[0]} to {documents[1]})"
    )


def _describe_tokens(
    errors: BlockErrors, checker: BlockChecker, dataset: IndexedDataset
) -> Iterator[str]:
    bin_path, _ = token_paths(dataset.prefix)
    if errors.bad_ids:
        count, token, token_id = _add_up(errors.bad_ids)
        sequence = _sequence_of(dataset, token)
        offset = token - int(dataset.sequence_pointers[sequence]) // dataset.dtype.itemsize
        size = checker.vocabulary_size
        allowed = "below 0" if size is None else f"outside the vocabulary (0 to {size - 1})"
        yield (
            f"{bin_path}: ids {allowed}: {count}; the first is {token_id}: token "
            f"{offset} of sequence {sequence} (document {_document_of(dataset, sequence)})"
        )
    if errors.bad_ends:
        count, document, token_id = _add_up(errors.bad_ends)
        yield (
            f"{bin_path}: documents that do not end with the end of document "
            f"({checker.eod_id}): {count}; the first is document {document}, "
            f"which ends with {token_id}"
        )


def _add_up(spans: list[BadTokens]) -> BadTokens:
    return spans[0]._replace(n_tokens=sum(span.n_tokens for span in spans))


def _sequence_of(dataset: IndexedDataset, token: int) -> int:
    """Finds the sequence that holds a token of the .bin."""
    return bisect_right(dataset.sequence_pointers, token * dataset.dtype.itemsize) - 1


def _document_of(dataset: IndexedDataset, sequence: int) -> int:
    """Finds the document that holds a sequence."""
    return bisect_right(dataset.document_indices, sequence) - 1
