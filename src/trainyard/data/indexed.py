"""Megatron-LM's token files: `<prefix>.bin` and `<prefix>.idx`, read and written byte for byte.

A worked example: two documents, [5, 6, 7] and [8, 7], as 16-bit ids. Numbers are little-endian
without padding, so most arrays in the .idx are unaligned.

    corpus.bin   05 00 06 00 07 00 | 08 00 07 00        every sequence, back to back
    corpus.idx   byte  0   "MMIDIDX", two zero bytes    magic
                       9   1                            version, 64 bits
                      17   8                            kind of token id, 8 bits: 8 is uint16
                      18   2                            S, the number of sequences
                      26   3                            D, the number of documents + 1
                      34   3 2                          length of each sequence in tokens, int32[S]
                      42   0 6                          byte of the .bin where each starts, int64[S]
                      58   0 1 2                        sequences before each document, int64[D]
                      82   the end: 34 + 12 S + 8 D

A document is one sequence. An empty document has none, and its entry in the last array repeats
(documents [5], [], [6] give 0 1 1 2).
"""

from __future__ import annotations

import ctypes
import glob
import math
import mmap
import os
import struct
import weakref
from array import array
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from trainyard.errors import DataError, MachineError
from trainyard.files import (
    BlockChecksum,
    BlockWriter,
    explain_disk_errors,
    open_file,
    refuse_lfs_pointer,
)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_DAMAGED = "the file is damaged; copy or prepare it again"
_PAIR = "token files are a pair, <prefix>.bin and <prefix>.idx; "
RAW_TOKENS = f"{_PAIR}docs/importing.md converts raw token ids, as of nanoGPT and llm.c"
DTYPE_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

FileState = tuple[int, int, int]
"""Size, time of change and inode of a file."""

_HEADER = struct.Struct("<9sQBQQ")
_LARGEST_UINT16_VOCABULARY = 65500  # Megatron-LM's own bound, not 2^16
_SLAB = 1 << 16  # entries looked at together: bounds memory without costing time
_SMALL_BYTES = 1 << 16

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

Array = NDArray[Any]


def optimal_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Returns the kind of integer Megatron-LM stores ids of this vocabulary in."""
    return np.dtype(np.uint16 if vocabulary_size < _LARGEST_UINT16_VOCABULARY else np.int32)


def count_tokens(prefix: str | Path) -> int:
    """Counts the tokens of a .bin by its size and the header of its .idx, reading nothing else.

    Raises:
        DataError: a file is missing, the header is damaged, or the .bin ends inside a token.
    """
    bin_bytes, (dtype, _, _) = read_sizes(prefix)
    n_tokens, rest = divmod(bin_bytes, dtype.itemsize)
    if rest:
        raise DataError(
            f"{prefix}.bin: {bin_bytes} bytes are not whole tokens of {dtype.itemsize} bytes",
            "the .bin is cut short or belongs to another .idx; copy or prepare both again",
        )
    return n_tokens


def read_sizes(prefix: str | Path) -> tuple[int, tuple[np.dtype[Any], int, int]]:
    """Returns the size of a .bin, and of its .idx the kind of integer and the numbers of entries.

    Raises:
        DataError: a file is missing, or the header is damaged.
    """
    bin_path, idx_path = token_paths(prefix)
    return _size_bytes(bin_path), _read_header(idx_path)


def file_state(status: os.stat_result) -> FileState:
    """Returns what changes with the content of a file: its size, time of change and inode."""
    # Time of change: unlike that of modification no program sets it back.
    return status.st_size, status.st_ctime_ns, status.st_ino


def index_state(prefix: str | Path) -> FileState:
    """Returns what changes with the content of a .idx."""
    return file_state(token_paths(prefix)[1].stat())


def token_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Returns the .bin and the .idx of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class IndexedDataset:
    """Token files opened for reading: memory-mapped, and checked whole except for the ids.

    Args:
        prefix: the path without `.bin` or `.idx`.
        trusted: states of .idx files that were checked before; these are not read whole again.

    Attributes:
        prefix: the path without `.bin` or `.idx`.
        dtype: the kind of integer of the stored ids.
        sequence_lengths: tokens of each sequence, int32, not aligned in memory.
        sequence_pointers: byte offset of each sequence in the .bin, int64.
        document_indices: sequences before each document, and the total, int64.
        stream: every token of the .bin, as stored.
        n_tokens: how many that is.
        span: which tokens of the .bin these are: all, unless this is a split's part.

    Raises:
        DataError: a file is missing, damaged, cut short, or does not fit the other.
    """

    def __init__(self, prefix: str | Path, trusted: Container[FileState] = ()) -> None:
        self.prefix = str(prefix)
        bin_path, self._idx_path = token_paths(prefix)
        bin_bytes, (self.dtype, n_sequences, n_entries) = read_sizes(prefix)
        pointers_at = _HEADER.size + 4 * n_sequences
        documents_at = pointers_at + 8 * n_sequences
        size_bytes = documents_at + 8 * n_entries
        raw = map_array(self._idx_path, np.dtype(np.uint8), (size_bytes,))
        self.sequence_lengths: NDArray[np.int32] = raw[_HEADER.size : pointers_at].view("<i4")
        self.sequence_pointers: NDArray[np.int64] = raw[pointers_at:documents_at].view("<i8")
        self.document_indices: NDArray[np.int64] = raw[documents_at:].view("<i8")
        if index_state(prefix) not in trusted:
            self._check_sequences()
            self._check_documents()
        self.n_tokens = 0
        if n_sequences:
            last_start = int(self.sequence_pointers[-1]) // self.dtype.itemsize
            self.n_tokens = last_start + int(self.sequence_lengths[-1])
        if self.n_tokens * self.dtype.itemsize > bin_bytes:
            raise DataError(
                f"{bin_path}: {bin_bytes} bytes, but {self._idx_path.name} describes "
                f"{self.n_tokens} tokens of {self.dtype.itemsize} bytes = "
                f"{self.n_tokens * self.dtype.itemsize}",
                "the .bin is cut short or belongs to another .idx; copy or prepare both again",
            )
        self.stream: Array = np.empty(0, self.dtype)
        if self.n_tokens:  # an empty file cannot be mapped
            self.stream = map_array(bin_path, self.dtype, (self.n_tokens,))
        self.span = range(self.n_tokens)

    def _check_sequences(self) -> None:
        """Checks lengths and pointers against each other."""
        n_tokens = 0
        for first in range(0, len(self), _SLAB):
            lengths = self.sequence_lengths[first : first + _SLAB]
            pointers = self.sequence_pointers[first : first + _SLAB]
            if lengths.min() < 0:
                at = int(np.argmax(lengths < 0))
                raise self._damage(
                    4 * (first + at), f"sequence_lengths[{first + at}] is {lengths[at]}"
                )
            ends = np.cumsum(lengths, dtype=np.int64) + n_tokens
            expected = (ends - lengths) * self.dtype.itemsize
            if not np.array_equal(pointers, expected):
                at = int(np.argmax(pointers != expected))
                raise self._damage(
                    4 * len(self) + 8 * (first + at),
                    f"sequence_pointers[{first + at}] is {pointers[at]}, but the lengths before it "
                    f"make {expected[at]}",
                )
            n_tokens = int(ends[-1])

    def _check_documents(self) -> None:
        previous = 0
        for first in range(0, len(self.document_indices), _SLAB):
            entries = self.document_indices[first : first + _SLAB]
            falls = np.diff(entries, prepend=previous) < 0
            if falls.any() or (first == 0 and entries[0] != 0):
                at = int(np.argmax(falls))
                raise self._damage(
                    12 * len(self) + 8 * (first + at),
                    f"document_indices[{first + at}] is {entries[at]}; they start at 0 and never "
                    "fall",
                )
            previous = int(entries[-1])
        if previous != len(self) or not len(self.document_indices):
            problem = f"document_indices end at {previous}, not at the {len(self)} sequences"
            raise DataError(f"{self._idx_path}: {problem}", _DAMAGED)

    def _damage(self, offset: int, problem: str) -> DataError:
        """Describes a wrong entry at this byte after the header."""
        return DataError(f"{self._idx_path}: byte {_HEADER.size + offset}: {problem}", _DAMAGED)

    def __len__(self) -> int:
        """Counts the sequences."""
        return len(self.sequence_lengths)

    def tokens(self, index: int) -> Array:
        """Returns the tokens of one sequence, as a view of the file."""
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        return self.stream[start : start + int(self.sequence_lengths[index])]

    def load_sequence_lengths(self, part: range) -> NDArray[np.int32]:
        """Copies some of `sequence_lengths` into aligned memory, where look-ups are fast."""
        return np.array(self.sequence_lengths[part.start : part.stop])


def map_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> Array:
    """Maps an array in a file, read-only, without keeping the file open; reads a small one.

    A blend may have thousands of files. numpy.memmap keeps each open, and most machines allow a
    process 1,024 open files and 65,530 mappings.

    Raises:
        OSError: the file cannot be opened.
        MachineError: the process has too many mappings.
    """
    count = math.prod(shape)
    if count * dtype.itemsize <= _SMALL_BYTES:
        return np.fromfile(path, dtype, count, offset=offset).reshape(shape)
    n_bytes = offset + count * dtype.itemsize
    with open_file(path) as file:
        address = _LIBC.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise MachineError(
            f"{path} cannot be mapped into memory: {os.strerror(ctypes.get_errno())}",
            "as root: sysctl -w vm.max_map_count=1000000; or prepare fewer, larger token files",
        )
    buffer = (ctypes.c_char * n_bytes).from_address(address)
    weakref.finalize(buffer, _LIBC.munmap, address, n_bytes).atexit = False
    mapped: Array = np.frombuffer(memoryview(buffer), dtype, count, offset).reshape(shape)
    mapped.flags.writeable = False
    return mapped


def _size_bytes(path: Path) -> int:
    try:
        with open_file(path) as file:
            refuse_lfs_pointer(file, path, DataError)
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", _suggest_prefix(path)) from error


def _suggest_prefix(path: Path) -> str:
    """Explains prefixes, or suggests the one that `prepare` wrote for this output."""
    made = sorted(path.parent.glob(f"{glob.escape(path.stem)}_*_document.bin"))
    if made:
        return f"did you mean the prefix {made[0].with_suffix('')}?"
    if path.suffix == ".idx" and path.with_suffix(".bin").is_file():
        return RAW_TOKENS
    hint = f"{_PAIR}give the prefix without ending"
    if not path.is_absolute():
        hint += f"; relative paths start at the working folder, here {Path.cwd()}"
    return hint


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Reads and checks the 34 bytes that say how long the rest must be."""
    remake = "the file is damaged or of another format; prepare the corpus again"
    size_bytes = _size_bytes(path)
    if size_bytes < _HEADER.size:
        raise DataError(f"{path}: {size_bytes} bytes, less than its header of 34", remake)
    with path.open("rb") as file:
        magic, version, code, n_sequences, n_entries = _HEADER.unpack(file.read(_HEADER.size))
    if magic != MAGIC:
        raise DataError(f"{path}: byte 0: starts with {magic!r}, not {MAGIC!r}", remake)
    if version != VERSION:
        raise DataError(f"{path}: byte 9: version {version}; only version 1 is supported", remake)
    if code not in DTYPE_CODES:
        codes = ", ".join(f"{number} ({name})" for number, name in DTYPE_CODES.items())
        raise DataError(f"{path}: byte 17: dtype code {code} is not one of {codes}", remake)
    expected_bytes = _HEADER.size + 12 * n_sequences + 8 * n_entries
    if size_bytes != expected_bytes:
        raise DataError(
            f"{path}: {size_bytes} bytes, but its counts at byte 18 ({n_sequences} sequences, "
            f"{n_entries} document entries) make {expected_bytes}",
            "the file is cut short, damaged or multimodal; copy or prepare it again, for text only",
        )
    return np.dtype(DTYPE_CODES[code]), n_sequences, n_entries


class IndexedWriter:
    """Writes token files; they appear under their names when the `with` block ends well.

    Until then they are `<prefix>.bin.partial` and `<prefix>.idx.partial`, removed on an error.
    Memory grows by 8 bytes a document.

    Attributes:
        n_tokens: how many were written so far.
        bin_blocks: checksums of the .bin, complete when the `with` block has ended.

    Raises:
        DataError: a token does not fit `dtype`.
        MachineError: the disk is full or the folder cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any]) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self.n_tokens = 0
        self.bin_blocks: list[BlockChecksum] = []
        self._sequence_lengths = array("i")
        self._sequences_per_document = array("i")
        self._file: BinaryIO
        self._bin: BlockWriter

    def __enter__(self) -> Self:
        path = Path(f"{self.prefix}.bin.partial")
        with explain_disk_errors(path):
            self._file = path.open("wb")
        self._bin = BlockWriter(self._file)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            with suppress(OSError):  # closing writes again what the full disk refused
                self._file.close()
            for path in token_paths(self.prefix):
                Path(f"{path}.partial").unlink(missing_ok=True)

    def add_document(self, *sequences: Array) -> None:
        """Adds one document, usually of one sequence; sequences without a token are left out."""
        lengths = [len(sequence) for sequence in sequences if len(sequence)]
        for sequence in sequences:
            self._write_tokens(sequence)
        self._sequence_lengths.extend(lengths)
        self._sequences_per_document.append(len(lengths))

    def add_documents(self, tokens: Array, lengths: Array) -> None:
        """Adds many documents of one sequence each; a length of 0 is a document without one.

        Args:
            tokens: the ids of all of them, back to back.
            lengths: how many each has.
        """
        assert int(np.sum(lengths, dtype=np.int64)) == len(tokens), "lengths do not add up"
        self._write_tokens(tokens)
        self._sequence_lengths.frombytes(lengths[lengths > 0].astype("<i4").tobytes())
        self._sequences_per_document.frombytes((lengths > 0).astype("<i4").tobytes())

    def _write_tokens(self, tokens: Array) -> None:
        if tokens.dtype != self.dtype and len(tokens):
            limits = np.iinfo(self.dtype)
            lowest, highest = int(tokens.min()), int(tokens.max())
            if lowest < limits.min or highest > limits.max:
                raise DataError(
                    f"{self.prefix}.bin: token ids {lowest} to {highest} do not fit {self.dtype}",
                    "give the size of the vocabulary these ids were made with",
                )
        with explain_disk_errors(Path(self._file.name)):
            self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.n_tokens += len(tokens)

    def _finish(self) -> None:
        bin_path, idx_path = token_paths(self.prefix)
        partial = Path(f"{idx_path}.partial")
        lengths = np.frombuffer(self._sequence_lengths, dtype="<i4")
        counts = np.frombuffer(self._sequences_per_document, dtype="<i4")
        write_index(partial, self.dtype, (len(lengths), len(counts)), lambda: [(lengths, counts)])
        self.bin_blocks = self._bin.close_block()
        with explain_disk_errors(Path(self._file.name)):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            # Killed between the two, a .bin without .idx is refused; beside an old .idx it is not.
            idx_path.unlink(missing_ok=True)
            Path(f"{bin_path}.partial").replace(bin_path)
            partial.replace(idx_path)


def write_index(
    path: Path,
    dtype: np.dtype[Any],
    counts: tuple[int, int],
    read_slabs: Callable[[], Iterable[tuple[Array, Array]]],
) -> list[BlockChecksum]:
    """Writes a .idx from pieces that are asked for three times, and gives its checksums.

    Args:
        path: the file.
        dtype: kind of integer of the ids.
        counts: sequences and documents in all.
        read_slabs: gives consecutive pieces: the lengths of their sequences, and how many sequences
            each of their documents has.

    Raises:
        MachineError: the disk is full or the folder cannot be written.
    """
    code = next(code for code, name in DTYPE_CODES.items() if name == dtype.name)
    with explain_disk_errors(path), path.open("wb") as file:
        index = BlockWriter(file)
        index.write(_HEADER.pack(MAGIC, VERSION, code, counts[0], counts[1] + 1))
        for lengths, _ in read_slabs():
            index.write(np.ascontiguousarray(lengths, "<i4").data)
        for ends, slab in _running_sums(lengths for lengths, _ in read_slabs()):
            index.write(((ends - slab) * dtype.itemsize).data)
        index.write(np.zeros(1, "<i8").data)
        for ends, _ in _running_sums(per_document for _, per_document in read_slabs()):
            index.write(ends.data)
        file.flush()
        os.fsync(file.fileno())
        return index.close_block()


def _running_sums(pieces: Iterable[Array]) -> Iterator[tuple[NDArray[np.int64], Array]]:
    total = 0
    for values in pieces:
        for first in range(0, len(values), _SLAB):
            slab = values[first : first + _SLAB]
            sums = np.cumsum(slab, dtype=np.int64) + total
            total = int(sums[-1])
            yield sums, slab
