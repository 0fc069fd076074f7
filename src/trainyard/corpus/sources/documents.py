"""Reads documents from a segment of any supported file, and locates every fault."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from trainyard.corpus.sources.batch import Batch, Fault
from trainyard.corpus.sources.blocks import DamagedFileError, read_blocks
from trainyard.corpus.sources.files import Segment, format_of
from trainyard.corpus.sources.jsonl import (
    MAX_DOCUMENT_BYTES,
    invalid_utf8,
    read_jsonl,
    start_of,
    too_long,
)
from trainyard.corpus.sources.tables import read_table
from trainyard.corpus.sources.wikipedia import read_wikipedia
from trainyard.errors import DataError, explain_failure, printable

_MAGICS = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\0", ".zst": b"\x28\xb5\x2f\xfd"}


def read_documents(
    segment: Segment, key: str, fields: Sequence[str] = (), split_on: str = ""
) -> Iterator[Batch]:
    """Yields the documents of a segment in file order.

    Args:
        segment: what to read.
        key: the JSON key, or the Parquet or Arrow column, of the text.
        fields: dotted paths of metadata to bring along.
        split_on: documents are split wherever they have this text, and blank parts left out.

    Raises:
        DataError: the file cannot be opened or read.
    """
    n_lines = 0
    problem = f"{printable(segment.path)} cannot be read"
    with explain_failure(problem, "check that the file is there and may be read", DataError):
        try:
            for batch in _read(segment, key, fields, split_on):
                if split_on:
                    _split_texts(batch, split_on)
                n_lines += batch.n_lines
                for field in fields:  # the format has none, or nothing could be read
                    batch.fields.setdefault(field, [""] * len(batch.texts))
                batch.faults[:] = [
                    replace(_say_how_to_convert(fault, segment.path), path=segment.path.as_posix())
                    for fault in batch.faults
                ]
                yield batch
        except DamagedFileError as error:
            fault = _explain_damage(error, segment.path, n_lines)
            yield Batch([], 0, 0, [fault], {field: [] for field in fields})


def _read(segment: Segment, key: str, fields: Sequence[str], split_on: str) -> Iterator[Batch]:
    kind, _ = format_of(segment.path)
    if kind == "jsonl":
        return read_jsonl(segment, key, fields)
    if kind in ("parquet", "arrow"):
        return read_table(segment, key, fields)
    return read_wikipedia(segment) if kind == "wikipedia" else _read_txt(segment, split_on)


def _split_texts(batch: Batch, mark: str) -> None:
    parts = [[part for part in text.split(mark) if part.strip()] for text in batch.texts]
    batch.texts[:] = [part for found in parts for part in found]
    for column in batch.fields.values():
        column[:] = [value for value, found in zip(column, parts, strict=True) for _ in found]


def _explain_damage(error: DamagedFileError, path: Path, n_lines: int) -> Fault:
    compression = format_of(path)[1]
    with path.open("rb") as file:
        head = file.read(8)
    if compression and not n_lines and _compression_of(head) != compression:
        detail = f"the file is not {compression} data, despite its name: it begins with {head!r}"
        return Fault("damaged file", 0, detail, "name it after what it holds", path=path.as_posix())
    detail = f"the file is damaged after document {n_lines}: {error}"
    if error.suspect_from is not None:
        detail += "; earlier ones may have wrong characters: the checksum fails too"
    return Fault("damaged file", 0, detail, "fetch or make the file again", path=path.as_posix())


def _compression_of(head: bytes) -> str:
    """Names the compression of a file by its first bytes; "" for none."""
    return next((suffix for suffix, magic in _MAGICS.items() if head.startswith(magic)), "")


def _say_how_to_convert(fault: Fault, path: Path) -> Fault:
    """Adds the command that converts the file as the hint, or says that it is packed."""
    if format_of(path)[1]:
        return fault
    name = shlex.quote(str(path))
    start = fault.raw.strip()[:2]
    if fault.kind == "malformed JSON" and start in (b"[", b"[{", b"{"):
        each, lines = "." if start == b"{" else "'.[]'", path.with_suffix(".lines.jsonl")
        command = f"jq -c {each} {name} > {shlex.quote(str(lines))}"
        return replace(fault, hint=f"write one JSON object per line: {command}")
    if fault.kind != "invalid UTF-8":
        return fault
    if fault.position <= 1 and (compression := _compression_of(fault.raw)):
        detail = f"the file is {compression} data, which its name does not say"
        return replace(fault, detail=detail, hint=f"add {compression} to its name")
    encoding = "LATIN1"
    if fault.raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "UTF-16"
    elif re.search(rb"[\x80-\x9f]", fault.raw):  # controls in Latin-1, quotes on Windows
        encoding = "WINDOWS-1252"
    converted = shlex.quote(f"{path}.utf8")
    command = f"iconv -f {encoding} -t UTF-8 {name} > {converted} && mv {converted} {name}"
    return replace(fault, hint=f"convert it: {command}")


def _read_txt(segment: Segment, split_on: str) -> Iterator[Batch]:
    """Yields a file as one document, or a document for each part between marks."""
    mark = split_on.encode()
    rest, n_skipped, place, taken = b"", 0, 0, 0
    for block, n_bytes in read_blocks(segment):
        rest, taken = rest + block, taken + n_bytes
        *parts, rest = rest.split(mark) if mark else [rest]
        if parts:
            batch = Batch([], len(parts), taken)
            for part in parts:
                _add_text(batch, part, place, n_skipped)
                place, n_skipped = place + n_skipped + len(part) + len(mark), 0
            yield batch
            taken = 0
        if n_skipped + len(rest) > MAX_DOCUMENT_BYTES:  # keeps its end, which may begin a mark
            head = start_of([rest])
            tail = rest[max(len(rest) - len(mark), len(head)) :]
            n_skipped += len(rest) - len(head) - len(tail)
            rest = head + tail
    batch = Batch([], 1, taken)
    _add_text(batch, rest, place, n_skipped)
    yield batch


def _add_text(batch: Batch, data: bytes, place: int, n_skipped: int) -> None:
    """Adds a document, which begins at `place`, or its fault; `n_skipped` bytes of it are gone."""
    if len(data) + n_skipped > MAX_DOCUMENT_BYTES:
        n_bytes = len(data) + n_skipped
        batch.faults.append(too_long("file", 0, start_of([data]), n_bytes))
        return
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        batch.faults.append(invalid_utf8(error, 0, place))
        return
    if "\0" in text:
        detail = f"byte {place + data.index(0)} is NUL, which no plain text has"
        hint = "unpack it if it is an archive; if a disk damaged it, restore it"
        batch.faults.append(Fault("NUL", 0, detail, hint, start_of([data])))
        return
    batch.texts.append(text if place else text.removeprefix("\ufeff"))
