"""Documents of text out of a segment of any known file, with every fault and its place."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trainyard.data.sources.batch import Batch, Fault
from trainyard.data.sources.blocks import DamagedFileError, read_blocks
from trainyard.data.sources.files import Segment, format_of
from trainyard.data.sources.jsonl import (
    LENGTH_HINT,
    MAX_DOCUMENT_BYTES,
    invalid_utf8,
    read_jsonl,
)
from trainyard.data.sources.parquet import read_parquet
from trainyard.data.sources.wikipedia import read_wikipedia
from trainyard.errors import DataError, printable


def read_documents(segment: Segment, key: str, fields: Sequence[str] = ()) -> Iterator[Batch]:
    """Yields the documents of a segment in file order.

    Args:
        segment: what to read.
        key: the JSON key, or the Parquet column, of the text.
        fields: dotted paths of metadata to bring along.

    Raises:
        DataError: the file cannot be opened or read.
    """
    n_lines = 0
    try:
        for batch in _read(segment, key, fields):
            n_lines += batch.n_lines
            batch.faults[:] = [_say_how_to_convert(fault, segment.path) for fault in batch.faults]
            yield batch
    except OSError as error:
        problem = f"{printable(segment.path)} cannot be read: {error.strerror or error}"
        raise DataError(problem, "check that the file is there and may be read") from error
    except DamagedFileError as error:
        detail = f"the file is damaged after document {n_lines}: {error}"
        hint = (
            "fetch or make the file again; --on-error quarantine keeps what comes before the damage"
        )
        yield Batch([], 0, 0, [Fault("damaged file", 0, detail, hint)])


def _read(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[Batch]:
    kind, _ = format_of(segment.path)
    if kind == "jsonl":
        return read_jsonl(segment, key, fields)
    if kind == "parquet":
        return read_parquet(segment, key, fields)
    plain = read_wikipedia(segment) if kind == "wikipedia" else _read_txt(segment)
    return (_without_metadata(batch, fields) for batch in plain)


def _say_how_to_convert(fault: Fault, path: Path) -> Fault:
    """Adds the command that converts the file to UTF-8 as the hint."""
    if fault.kind != "invalid UTF-8" or format_of(path)[1]:
        return fault
    encoding = "LATIN1"
    if fault.raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "UTF-16"
    elif re.search(rb"[\x80-\x9f]", fault.raw):  # controls in Latin-1, quotes on Windows
        encoding = "WINDOWS-1252"
    name, converted = shlex.quote(str(path)), shlex.quote(f"{path}.utf8")
    command = f"iconv -f {encoding} -t UTF-8 {name} > {converted} && mv {converted} {name}"
    return replace(fault, hint=f"convert it: {command}")


def _without_metadata(batch: Batch, fields: Sequence[str]) -> Batch:
    """Fills the columns of metadata that the format has not got."""
    batch.fields.update({field: [""] * len(batch.texts) for field in fields})
    return batch


def _read_txt(segment: Segment) -> Iterator[Batch]:
    pieces: list[bytes] = []
    total_bytes = 0
    for block, _ in read_blocks(segment):
        total_bytes += len(block)
        pieces.append(block)
        if total_bytes > MAX_DOCUMENT_BYTES:
            fault = Fault("too long", 0, "the file is too long for one document", LENGTH_HINT)
            yield Batch([], 1, segment.end, [fault])
            return
    data = b"".join(pieces)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        yield Batch([], 1, segment.end, [invalid_utf8(error, 0, 0)])
        return
    yield Batch([text.removeprefix("\ufeff")], 1, segment.end)
