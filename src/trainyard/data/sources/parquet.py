"""Documents out of Parquet: the text in one column, metadata in others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainyard.data.sources.batch import Batch, Fault
from trainyard.data.sources.blocks import DamagedFileError
from trainyard.data.sources.files import Segment
from trainyard.data.sources.jsonl import (
    LENGTH_HINT,
    MAX_DOCUMENT_BYTES,
    missing_key,
    render_value,
)

_ROWS = 512


def read_parquet(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[Batch]:
    """Yields the documents of a file; `fields` are dotted paths into columns of structs.

    Raises:
        DamagedFileError: after the last good rows of a damaged file.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(segment.path) as file:
            names = file.schema_arrow.names
            if key not in names:
                yield Batch([], 0, segment.end, [missing_key(key, names, 0)])
                return
            n_rows = max(file.metadata.num_rows, 1)
            present = [field for field in fields if field.split(".")[0] in names]
            row = 1
            columns = [key, *dict.fromkeys(field.split(".")[0] for field in present)]
            for rows in file.iter_batches(_ROWS, columns=columns, use_threads=False):
                good, texts, faults = _read_texts(rows.column(key), key, row)
                metadata = {field: [""] * len(texts) for field in fields}
                for field in present:
                    metadata[field] = _read_field(rows, field, good)
                share = segment.end * len(rows) // n_rows
                yield Batch(texts, len(rows), share, faults, metadata)
                row += len(rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise DamagedFileError(str(error)) from error


def _read_field(rows: Any, field: str, good: list[int]) -> list[str]:
    column, *inside = field.split(".")
    values = rows.column(column).to_pylist()
    found = []
    for index in good:
        value = values[index]
        for part in inside:
            value = value.get(part) if isinstance(value, dict) else None
        found.append(render_value(value))
    return found


def _read_texts(column: Any, key: str, row: int) -> tuple[list[int], list[str], list[Fault]]:
    """Gives the indices of good rows, their texts, and what is wrong with the others."""
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
        if isinstance(value, str) and len(value) <= MAX_DOCUMENT_BYTES:
            good.append(index)
            texts.append(value)
        elif isinstance(value, str):
            faults.append(Fault("too long", row + index, "the text is too long", LENGTH_HINT))
        else:
            detail = f'the value of "{key}" is {str(value)[:40]}, not a string'
            hint = "choose a column of strings as json_key, or leave the row out"
            faults.append(Fault("not a string", row + index, detail, hint, str(value).encode()))
    return good, texts, faults
