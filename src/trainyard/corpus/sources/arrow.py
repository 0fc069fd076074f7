"""Reads documents from Arrow files, as Hugging Face's datasets library keeps them on disk.

Both of Arrow's formats: streams, which the library writes, and files, which begin with `ARROW1`.
The file is mapped into memory and its record batches are read one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trainyard.corpus.sources.batch import Batch
from trainyard.corpus.sources.blocks import DamagedFileError
from trainyard.corpus.sources.files import Segment
from trainyard.corpus.sources.parquet import MAX_ROWS, choose_columns, read_rows

_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_arrow(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[Batch]:
    """Yields the documents of a file; `fields` are dotted paths into columns of structs.

    Raises:
        DamagedFileError: after the last good rows of a damaged file.
    """
    import pyarrow

    try:
        with pyarrow.memory_map(str(segment.path)) as source:
            names = _open(source).schema.names
            columns, fault = choose_columns(names, key, fields)
            if fault is not None:
                n_rows = sum(len(rows) for rows in _record_batches(source, []))
                yield Batch([], 0, segment.end, [replace(fault, n_documents=n_rows)])
                return
            row, left_bytes = 1, segment.end
            for rows in _record_batches(source, [names.index(column) for column in columns]):
                for column in rows.columns:
                    _check_offsets(column)
                for start in range(0, len(rows), MAX_ROWS):
                    part = rows.slice(start, MAX_ROWS)
                    n_bytes = min(part.nbytes, left_bytes)
                    left_bytes -= n_bytes
                    yield read_rows(part, key, fields, row + start, n_bytes)
                row += len(rows)
            yield Batch([], 0, left_bytes)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedFileError(str(error)) from error


def _open(source: Any, fields: Sequence[int] = ()) -> Any:
    import pyarrow.ipc

    options = pyarrow.ipc.IpcReadOptions(included_fields=list(fields), use_threads=False)
    is_file = source.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC
    source.seek(0)
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source, options=options)


def _record_batches(source: Any, fields: Sequence[int]) -> Iterator[Any]:
    """Yields the batches of rows, with the columns of these numbers only (none: all)."""
    import pyarrow

    reader = _open(source, fields)
    if hasattr(reader, "get_batch"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
        return
    yield from reader
    # A stream that was cut between two batches reads like a whole one.
    source.seek(source.size() - len(_END_OF_STREAM))
    if source.read() != _END_OF_STREAM:
        raise pyarrow.ArrowInvalid("it ends without Arrow's end of stream")


def _check_offsets(column: Any) -> None:
    """Checks that no value lies outside the file; invalid UTF-8 in texts is found row by row."""
    import pyarrow

    if pyarrow.types.is_string(column.type):
        column = column.view(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.view(pyarrow.large_binary())
    column.validate(full=True)
