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

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainyard.corpus.block_checker import (
    BlockChecker,
    BlockErrors,
    Span,
    document_of,
    sequence_of,
)
from trainyard.data.indexed import IndexedDataset, token_paths
from trainyard.data.sidecar import Sidecar, load_sidecar
from trainyard.data.tokenizer import Tokenizer
from trainyard.errors import DataError, refuse_problems
from trainyard.files import BLOCK_BYTES, BlockChecksum, open_file

# Takes bytes done and bytes in all.
Progress = Callable[[int, int], None]

_THREADS = 2
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
    problems = _Problems(prefix)
    record = _load_record(prefix, problems)
    dataset = _open_dataset(prefix, problems)
    if record is not None:
        _check_record(record, dataset, tokenizer, problems)
    made_by = record.tokenizer if record is not None else tokenizer
    checker = BlockChecker(
        dataset,
        made_by.vocabulary_size if made_by is not None else None,
        record.tokenizer.eod_id if record is not None and record.append_eod else None,
    )
    with ExitStack() as stack:
        spans = list(_open_spans(prefix, record, stack, problems))
        _check_spans(spans, checker, problems, progress)
    problems.raise_if_any()
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


class _Problems:
    """Every problem once; the first few in words."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._texts: dict[str, None] = {}

    def add(self, text: str) -> None:
        self._texts[text] = None

    def raise_if_any(self) -> None:
        hint = "copy .bin, .idx and .json again from where they were made, or prepare the data"
        refuse_problems(self.prefix, list(self._texts), DataError, f"{hint} again")


def _load_record(prefix: str, problems: _Problems) -> Sidecar | None:
    if not Path(f"{prefix}.json").exists():
        return None
    try:
        return load_sidecar(prefix)
    except DataError as error:
        problems.add(error.problem)
    return None


def _open_dataset(prefix: str, problems: _Problems) -> IndexedDataset | None:
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        problems.add(error.problem)
        return None
    bin_path, idx_path = token_paths(prefix)
    size_bytes = bin_path.stat().st_size
    described_bytes = dataset.n_tokens * dataset.dtype.itemsize
    if size_bytes > described_bytes:
        problems.add(
            f"{bin_path}: {size_bytes} bytes, but {idx_path.name} describes only {described_bytes}"
        )
    return dataset


def _check_record(
    record: Sidecar,
    dataset: IndexedDataset | None,
    tokenizer: Tokenizer | None,
    problems: _Problems,
) -> None:
    """Compares the record with the files and the tokenizer."""
    path = Path(f"{problems.prefix}.json")
    made_by = record.tokenizer
    if dataset is not None:
        found = {
            "documents": len(dataset.document_indices) - 1,
            "empty_documents": _count_empty_documents(dataset),
            "sequences": len(dataset),
            "tokens": dataset.n_tokens,
            "dtype": dataset.dtype.name,
        }
        for name, value in found.items():
            if getattr(record, name) != value:
                problems.add(f"{path}: {name} is {getattr(record, name)}, the files have {value}")
    if not 0 <= made_by.eod_id < made_by.vocabulary_size:
        problems.add(
            f"{path}: eod_id {made_by.eod_id} is outside the vocabulary of "
            f"{made_by.vocabulary_size} tokens"
        )
    if tokenizer is None:
        return
    try:
        record.check_against(tokenizer.name, tokenizer.fingerprint, problems.prefix)
    except DataError as error:
        problems.add(error.problem)
        return
    for name in ("vocabulary_size", "eod_id"):
        said, value = getattr(made_by, name), getattr(tokenizer, name)
        if said != value:
            problems.add(f"{path}: {name} is {said}, the tokenizer {tokenizer.name} has {value}")


def _count_empty_documents(dataset: IndexedDataset) -> int:
    entries = dataset.document_indices
    slabs = (entries[first : first + _SLAB + 1] for first in range(0, len(entries) - 1, _SLAB))
    return sum(int(np.count_nonzero(np.diff(slab) == 0)) for slab in slabs)


def _open_spans(
    prefix: str, record: Sidecar | None, stack: ExitStack, problems: _Problems
) -> Iterator[Span]:
    """Opens both files and cuts them as the record does; they stay open as long as `stack`."""
    files = (None, None) if record is None else (record.bin, record.idx)
    for path, written in zip(token_paths(prefix), files, strict=True):
        try:
            file_descriptor = stack.enter_context(open_file(path)).fileno()
            size_bytes = os.fstat(file_descriptor).st_size
        except OSError as error:
            problems.add(f"{path}: {error.strerror}")
            continue
        blocks: list[BlockChecksum] = []
        if written is not None:
            if written.size_bytes != size_bytes:
                problems.add(
                    f"{path}: {size_bytes} bytes, but {written.size_bytes} were written: "
                    + ("cut short" if size_bytes < written.size_bytes else "something was added")
                )
            if all(block.n_bytes > 0 for block in written.blocks):
                blocks = written.blocks
            else:
                problems.add(f"{prefix}.json: the blocks of {path.name} have sizes below 1")
        yield from _cut(path, file_descriptor, size_bytes, blocks)


def _cut(
    path: Path, file_descriptor: int, size_bytes: int, blocks: list[BlockChecksum]
) -> Iterator[Span]:
    """Cuts a file into its recorded blocks; what no whole block covers comes without checksum."""
    first = 0
    for block in blocks:
        if first + block.n_bytes > size_bytes:
            break
        yield Span(path, file_descriptor, first, block.n_bytes, block.sha256)
        first += block.n_bytes
    for start in range(first, size_bytes, BLOCK_BYTES):
        n_bytes = min(BLOCK_BYTES, size_bytes - start)
        yield Span(path, file_descriptor, start, n_bytes, None)


def _check_spans(
    spans: list[Span], checker: BlockChecker, problems: _Problems, progress: Progress | None
) -> None:
    """Checks all spans and puts what was found into words."""
    total_bytes, done_bytes = sum(span.n_bytes for span in spans), 0
    damaged: list[list[Span]] = []
    sum_of = BlockErrors()
    with ThreadPoolExecutor(_THREADS) as pool:
        for span, finding in zip(spans, pool.map(checker.check, spans), strict=True):
            if finding.error:
                problems.add(f"{span.path}: bytes {span.first} to {span.end - 1}: {finding.error}")
            if finding.differs:
                last = damaged[-1][-1] if damaged else None
                if last is not None and (last.path, last.end) == (span.path, span.first):
                    damaged[-1].append(span)
                else:
                    damaged.append([span])
            sum_of.bad_ids += finding.bad_ids
            sum_of.n_bad_ids += finding.n_bad_ids
            sum_of.bad_ends += finding.bad_ends
            sum_of.n_bad_ends += finding.n_bad_ends
            done_bytes += span.n_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    for run in damaged:
        problems.add(_describe_damage(run, checker.dataset))
    if checker.dataset is not None:
        _describe_ids(sum_of, checker, checker.dataset, problems)


def _describe_damage(run: list[Span], dataset: IndexedDataset | None) -> str:
    """Describes which bytes differ, with their sequences and documents."""
    path, first, last = run[0].path, run[0].first, run[-1].end - 1
    text = f"{path}: bytes {first} to {last} differ from what was written"
    if path.suffix != ".bin" or dataset is None or not dataset.n_tokens:
        return text
    itemsize = dataset.dtype.itemsize
    tokens = [min(byte // itemsize, dataset.n_tokens - 1) for byte in (first, last)]
    sequences = [sequence_of(dataset, token) for token in tokens]
    documents = [document_of(dataset, sequence) for sequence in sequences]
    return (
        f"{text} (sequences {sequences[0]} to {sequences[1]}, "
        f"documents {documents[0]} to {documents[1]})"
    )


def _describe_ids(
    finding: BlockErrors, checker: BlockChecker, dataset: IndexedDataset, problems: _Problems
) -> None:
    bin_path, _ = token_paths(dataset.prefix)
    if finding.bad_ids:
        token, token_id = finding.bad_ids[0]
        sequence = sequence_of(dataset, token)
        offset = token - int(dataset.sequence_pointers[sequence]) // dataset.dtype.itemsize
        size = checker.vocabulary_size
        allowed = "below 0" if size is None else f"outside the vocabulary (0 to {size - 1})"
        problems.add(
            f"{bin_path}: ids {allowed}: {finding.n_bad_ids}; the first is {token_id}: token "
            f"{offset} of sequence {sequence} (document {document_of(dataset, sequence)})"
        )
    if finding.bad_ends:
        document, token_id = finding.bad_ends[0]
        problems.add(
            f"{bin_path}: documents that do not end with the end of document "
            f"({checker.eod_id}): {finding.n_bad_ends}; the first is document {document}, which "
            f"ends with {token_id}"
        )
