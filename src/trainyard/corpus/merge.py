"""Last stage of preparation: joins parts in order into token files, without duplicates.

The kernel copies parts, so a join runs at disk speed with constant memory. It reuses the checksums
from when they were written. Only a part with documents to drop is read, and written with new
checksums.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainyard.data.indexed import Array, IndexedDataset, token_paths, write_index
from trainyard.errors import DataError, MachineError
from trainyard.files import BlockChecksum, BlockWriter, FileRecord, explain_disk_errors

_COPY_BYTES = 16 * 2**20
_NOT_BY_THE_KERNEL = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}


@dataclass(frozen=True)
class Part:
    """Token files of a unit, the checksums of the .bin, and which documents stay (None: all)."""

    prefix: Path
    blocks: list[BlockChecksum]
    stays: NDArray[np.bool_] | None = None


def merge_parts(
    parts: Sequence[Part], prefix: Path, dtype: np.dtype[Any]
) -> tuple[FileRecord, FileRecord]:
    """Joins parts into `<prefix>.bin` and `.idx`, as if all had been written in one go.

    Raises:
        DataError: a part is damaged.
        MachineError: the disk is full or the folder cannot be written.
    """
    bin_path, idx_path = token_paths(prefix)
    n_sequences = n_documents = 0
    with explain_disk_errors(bin_path), bin_path.open("wb") as file:
        blocks: list[BlockChecksum] = []
        for part in parts:
            dataset = IndexedDataset(part.prefix)
            if part.stays is None or part.stays.all():
                with token_paths(part.prefix)[0].open("rb") as source:
                    _copy(source, file, sum(block.n_bytes for block in part.blocks))
                blocks += part.blocks
            else:
                blocks += _copy_some(dataset, part.stays, file)
            lengths, per_document = _describe(dataset, part.stays)
            n_sequences += len(lengths)
            n_documents += len(per_document)
        file.flush()
        os.fsync(file.fileno())

    def read_slabs() -> Iterator[tuple[Array, Array]]:
        for part in parts:
            yield _describe(IndexedDataset(part.prefix), part.stays)

    index_blocks = write_index(idx_path, dtype, (n_sequences, n_documents), read_slabs)
    return FileRecord(blocks), FileRecord(index_blocks)


def _describe(dataset: IndexedDataset, stays: NDArray[np.bool_] | None) -> tuple[Array, Array]:
    """Returns the lengths of the sequences that stay, and how many each staying document has."""
    per_document = np.diff(dataset.document_indices)
    if stays is None:
        return dataset.sequence_lengths, per_document
    return dataset.sequence_lengths[np.repeat(stays, per_document)], per_document[stays]


def _copy(source: BinaryIO, target: BinaryIO, n_bytes: int) -> None:
    """Copies the first bytes of a file to the end of another, inside the kernel where it can."""
    target.flush()
    left = n_bytes
    while left:
        try:
            copied = os.copy_file_range(source.fileno(), target.fileno(), left)
        except AttributeError:  # not on this system
            break
        except OSError as error:
            if error.errno not in _NOT_BY_THE_KERNEL:
                raise
            break
        if not copied:  # some file systems say so when they cannot
            break
        left -= copied
    source.seek(n_bytes - left)
    target.seek(0, os.SEEK_END)
    while left:
        data = source.read(min(_COPY_BYTES, left))
        if not data:
            raise DataError(
                f"{source.name} is {left} bytes shorter than it was",
                "remove the work folder; then run the same command again",
            )
        target.write(data)
        left -= len(data)


def _copy_some(
    dataset: IndexedDataset, stays: NDArray[np.bool_], target: BinaryIO
) -> list[BlockChecksum]:
    """Copies the sequences of the documents that stay, run by run."""
    checked = BlockWriter(target)
    sequences = np.repeat(stays, np.diff(dataset.document_indices)).astype(np.int8)
    edges = np.flatnonzero(np.diff(sequences, prepend=0, append=0))
    ends = np.append(dataset.sequence_pointers, dataset.n_tokens * dataset.dtype.itemsize)
    for first, last in edges.reshape(-1, 2):
        start, stop = int(ends[first]), int(ends[last])
        tokens = dataset.stream.view(np.uint8)[start:stop]
        for at in range(0, len(tokens), _COPY_BYTES):
            checked.write(tokens[at : at + _COPY_BYTES].data)
    return checked.close_block()


def publish_files(made: Path, prefix: Path, *, replaces_other: bool) -> None:
    """Renames finished token files and their record to their final names, the record last.

    Two processes may do so with the same content; each leaves complete files.

    Args:
        made: prefix of the finished files.
        prefix: what they are to be called.
        replaces_other: whether files of other content may be there; an old record then goes first.

    Raises:
        FileNotFoundError: a finished file is gone; what stood under the final names still stands.
        MachineError: the folder cannot be written.
    """
    suffixes = [".bin", ".idx", ".json"]
    if Path(f"{made}.quarantine.jsonl").exists():
        suffixes.insert(2, ".quarantine.jsonl")
    try:
        for suffix in suffixes:
            Path(f"{made}{suffix}").stat()
        if replaces_other:
            for suffix in (".json", ".idx", ".quarantine.jsonl"):
                Path(f"{prefix}{suffix}").unlink(missing_ok=True)
        for suffix in suffixes:
            Path(f"{made}{suffix}").replace(f"{prefix}{suffix}")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise MachineError(
            f"{prefix}: {error.strerror}", "fix the folder; then run the same command again"
        ) from error
