"""Reads documents from Parquet and Arrow files: text in one column, metadata in others.

Hugging Face's datasets library keeps Arrow files, in both of Arrow's formats: streams, which it
writes, and files, which begin with `ARROW1`. They are mapped into memory, and their record batches
are read one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from trainyard.corpus.sources.batch import (
    MAX_DOCUMENT_BYTES,
    Batch,
    Fault,
    UnreadableDocumentError,
    missing_key,
    render_value,
    start_of,
    too_long,
)
from trainyard.corpus.sources.blocks import BLOCK_BYTES, DamagedFileError
from trainyard.corpus.sources.files import Segment, format_of

_MAX_ROWS = 512
# Without a buffer the column of a whole row group is read at once, and a row group may be the file.
_BUFFER_BYTES = 2**20
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_table(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[Batch]:
    """Yields the documents of a file; `fields` are dotted paths into columns of structs.

    Raises:
        DamagedFileError: after the last good rows of a damaged file.
    """
    import pyarrow

    read = _read_arrow if format_of(segment.path)[0] == "arrow" else _read_parquet
    row = 1
    try:
        for rows, n_bytes in read(segment, key, fields):
            good, texts, faults = _read_texts(rows.column(key), key, row)
            metadata = {field: _read_field(rows, field, good) for field in fields}
            yield Batch(texts, len(rows), n_bytes, faults, metadata)
            row += len(rows)
    except UnreadableDocumentError as error:
        yield Batch([], 0, segment.end, [error.fault])
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        # Damage is an OSError too, but one that the system knows no number for.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedFileError(str(error)) from error


def _choose_columns(
    names: list[str], key: str, fields: Sequence[str], count_rows: Callable[[], int]
) -> list[str]:
    """Returns the columns to read; raises if they are ambiguous or lack the text."""
    if key not in names:
        raise UnreadableDocumentError(replace(missing_key(key, names, 0), n_documents=count_rows()))
    tops = [field.split(".")[0] for field in fields]
    columns = list(dict.fromkeys([key, *(top for top in tops if top in names)]))
    for column in columns:
        if (count := names.count(column)) > 1:
            detail = f'{count} columns are called "{column}"; the columns are: {", ".join(names)}'
            hint = "rename all but one of them"
            fault = Fault("ambiguous column", 0, detail, hint, n_documents=count_rows())
            raise UnreadableDocumentError(fault)
    return columns


def _read_parquet(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Yields batches of rows, each with the bytes of the file it took."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(segment.path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
        parts, n_rows = file.metadata, file.metadata.num_rows
        columns = _choose_columns(file.schema_arrow.names, key, fields, lambda: n_rows)
        n_bytes = sum(parts.row_group(n).total_byte_size for n in range(parts.num_row_groups))
        # A batch of long texts is no larger than one of short texts, as far as they are alike.
        size = max(1, min(_MAX_ROWS, BLOCK_BYTES * n_rows // max(n_bytes, 1)))
        for rows in file.iter_batches(size, columns=columns, use_threads=False):
            yield rows, segment.end * len(rows) // max(n_rows, 1)


def _read_arrow(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Yields batches of rows, each with the bytes of the file it took."""
    import pyarrow

    with pyarrow.memory_map(str(segment.path)) as source:
        names = _open_arrow(source).schema.names
        columns = _choose_columns(
            names, key, fields, lambda: sum(len(rows) for rows in _record_batches(source, []))
        )
        left_bytes, empty = segment.end, pyarrow.record_batch({name: [] for name in columns})
        for rows in _record_batches(source, [names.index(column) for column in columns]):
            for column in rows.columns:
                _check_offsets(column)
            for start in range(0, len(rows), _MAX_ROWS):
                part = rows.slice(start, _MAX_ROWS)
                n_bytes = min(part.nbytes, left_bytes)
                left_bytes -= n_bytes
                yield part, n_bytes
        yield empty, left_bytes


def _open_arrow(source: Any, fields: Sequence[int] = ()) -> Any:
    import pyarrow.ipc

    options = pyarrow.ipc.IpcReadOptions(included_fields=list(fields), use_threads=False)
    is_file = source.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC
    source.seek(0)
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source, options=options)


def _record_batches(source: Any, fields: Sequence[int]) -> Iterator[Any]:
    """Yields the batches of rows, with the columns of these numbers only (none: all)."""
    import pyarrow

    reader = _open_arrow(source, fields)
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


def _read_field(rows: Any, field: str, good: list[int]) -> list[str]:
    import pyarrow
    import pyarrow.compute

    name, *inside = field.split(".")
    if name not in rows.schema.names:
        return [""] * len(good)
    column = rows.column(name)
    for part in inside:
        if not pyarrow.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
            return [""] * len(good)
        column = pyarrow.compute.struct_field(column, part)
    return [_render_field(column, index) for index in good]


def _render_field(column: Any, index: int) -> str:
    try:
        value = column[index].as_py()
    except UnicodeDecodeError as error:
        value = error.object
    except (ValueError, ArithmeticError, LookupError):
        # A time that Python has no type for: of nanoseconds, or of the year 10,000.
        return str(column.slice(index, 1).to_string(skip_new_lines=True))[1:-1]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return render_value(value)


def _read_texts(column: Any, key: str, row: int) -> tuple[list[int], list[str], list[Fault]]:
    """Returns the indices of good rows, their texts, and the faults of the others."""
    good: list[int] = []
    texts: list[str] = []
    faults: list[Fault] = []
    for number, scalar in enumerate(column, row):
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            detail = f"byte {error.start} of the text is not valid UTF-8"
            hint = "write the file from UTF-8 text"
            faults.append(Fault("invalid UTF-8", number, detail, hint, error.object))
            continue
        if not isinstance(value, str):
            detail = f'the value of "{key}" is {str(value)[:40]}, not a string'
            hint = "choose a column of strings as json_key, or leave the row out"
            faults.append(Fault("not a string", number, detail, hint, str(value).encode()))
        # A character has 4 bytes at most, so ordinary texts are not encoded to count them.
        elif 4 * len(value) > MAX_DOCUMENT_BYTES and len(value.encode()) > MAX_DOCUMENT_BYTES:
            data = value.encode()
            faults.append(too_long("text", number, start_of([data]), len(data)))
        else:
            good.append(number - row)
            texts.append(value)
    return good, texts, faults
