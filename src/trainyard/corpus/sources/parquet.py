"""Reads documents from Parquet: text in one column, metadata in others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trainyard.corpus.sources.batch import Batch, Fault
from trainyard.corpus.sources.blocks import BLOCK_BYTES, DamagedFileError
from trainyard.corpus.sources.files import Segment
from trainyard.corpus.sources.jsonl import (
    MAX_DOCUMENT_BYTES,
    missing_key,
    render_value,
    start_of,
    too_long,
)

MAX_ROWS = 512
# Without a buffer the column of a whole row group is read at once, and a row group may be the file.
_BUFFER_BYTES = 2**20


def read_parquet(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[Batch]:
    """Yields the documents of a file; `fields` are dotted paths into columns of structs.

    Raises:
        DamagedFileError: after the last good rows of a damaged file.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(
            segment.path, pre_buffer=False, buffer_size=_BUFFER_BYTES
        ) as file:
            columns, fault = choose_columns(file.schema_arrow.names, key, fields)
            if fault is not None:
                fault = replace(fault, n_documents=file.metadata.num_rows)
                yield Batch([], 0, segment.end, [fault])
                return
            n_rows = max(file.metadata.num_rows, 1)
            row = 1
            for rows in file.iter_batches(
                _rows_per_batch(file.metadata), columns=columns, use_threads=False
            ):
                yield read_rows(rows, key, fields, row, segment.end * len(rows) // n_rows)
                row += len(rows)
    except (pyarrow.ArrowException, OSError) as error:
        # Damage is an OSError too, but one that the system knows no number for.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedFileError(str(error)) from error


def choose_columns(
    names: Sequence[str], key: str, fields: Sequence[str]
) -> tuple[list[str], Fault | None]:
    """Returns the columns to read; and the problem if they are ambiguous or lack the text."""
    tops = [field.split(".")[0] for field in fields]
    columns = list(dict.fromkeys([key, *(top for top in tops if top in names)]))
    if key not in names:
        return columns, missing_key(key, list(names), 0)
    for column in columns:
        if (count := names.count(column)) > 1:
            detail = f'{count} columns are called "{column}"; the columns are: {", ".join(names)}'
            return columns, Fault("ambiguous column", 0, detail, "rename all but one of them")
    return columns, None


def read_rows(rows: Any, key: str, fields: Sequence[str], row: int, n_bytes: int) -> Batch:
    """Converts a record batch whose first row is number `row` of its file."""
    good, texts, faults = _read_texts(rows.column(key), key, row)
    metadata = {field: _read_field(rows, field, good) for field in fields}
    return Batch(texts, len(rows), n_bytes, faults, metadata)


def _rows_per_batch(metadata: Any) -> int:
    """Makes a batch of long texts no larger than one of short texts, as far as they are alike."""
    n_rows: int = metadata.num_rows
    n_bytes: int = sum(
        metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)
    )
    return max(1, min(MAX_ROWS, BLOCK_BYTES * n_rows // max(n_bytes, 1)))


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
    for index, scalar in enumerate(column):
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            detail = f"byte {error.start} of the text is not valid UTF-8"
            hint = "write the file from UTF-8 text"
            faults.append(Fault("invalid UTF-8", row + index, detail, hint, error.object))
            continue
        # A character has 4 bytes at most, so ordinary texts are not encoded to count them.
        if isinstance(value, str) and (
            4 * len(value) <= MAX_DOCUMENT_BYTES or len(value.encode()) <= MAX_DOCUMENT_BYTES
        ):
            good.append(index)
            texts.append(value)
        elif isinstance(value, str):
            data = value.encode()
            faults.append(too_long("text", row + index, start_of([data]), len(data)))
        else:
            detail = f'the value of "{key}" is {str(value)[:40]}, not a string'
            hint = "choose a column of strings as json_key, or leave the row out"
            faults.append(Fault("not a string", row + index, detail, hint, str(value).encode()))
    return good, texts, faults
