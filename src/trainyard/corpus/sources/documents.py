"""Reads documents from a segment of any supported file, and locates every fault."""

from __future__ import annotations

import codecs
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from trainyard.corpus.sources.batch import (
    MAX_DOCUMENT_BYTES,
    Batch,
    Fault,
    invalid_utf8,
    missing_key,
    render_value,
    start_of,
    too_long,
)
from trainyard.corpus.sources.blocks import DamagedFileError, find_damage, read_blocks
from trainyard.corpus.sources.files import Segment, format_of
from trainyard.corpus.sources.tables import read_table
from trainyard.corpus.sources.wikipedia import read_wikipedia
from trainyard.errors import DataError, explain_failure, printable

_GARBLED = ("malformed JSON", "invalid UTF-8")
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
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
    batch.texts[:] = [part for kept in parts for part in kept]
    for column in batch.fields.values():
        column[:] = [value for value, kept in zip(column, parts, strict=True) for _ in kept]


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
        jq_filter, lines = "." if start == b"{" else "'.[]'", path.with_suffix(".lines.jsonl")
        command = f"jq -c {jq_filter} {name} > {shlex.quote(str(lines))}"
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
    rest, n_skipped, offset, taken = b"", 0, 0, 0
    for block, n_bytes in read_blocks(segment):
        rest, taken = rest + block, taken + n_bytes
        *parts, rest = rest.split(mark) if mark else [rest]
        if parts:
            batch = Batch([], len(parts), taken)
            for part in parts:
                _add_text(batch, part, offset, n_skipped)
                offset, n_skipped = offset + n_skipped + len(part) + len(mark), 0
            yield batch
            taken = 0
        if n_skipped + len(rest) > MAX_DOCUMENT_BYTES:  # keeps its end, which may begin a mark
            head = start_of([rest])
            tail = rest[max(len(rest) - len(mark), len(head)) :]
            n_skipped += len(rest) - len(head) - len(tail)
            rest = head + tail
    batch = Batch([], 1, taken)
    _add_text(batch, rest, offset, n_skipped)
    yield batch


def _add_text(batch: Batch, data: bytes, offset: int, n_skipped: int) -> None:
    """Adds a document, or its fault; it begins at byte `offset`, and lacks `n_skipped` bytes."""
    if len(data) + n_skipped > MAX_DOCUMENT_BYTES:
        n_bytes = len(data) + n_skipped
        batch.faults.append(too_long("file", 0, start_of([data]), n_bytes))
        return
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        batch.faults.append(invalid_utf8(error, 0, offset))
        return
    if "\0" in text:
        detail = f"byte {offset + data.index(0)} is NUL, which no plain text has"
        hint = "unpack it if it is an archive; if a disk damaged it, restore it"
        batch.faults.append(Fault("NUL", 0, detail, hint, start_of([data])))
        return
    batch.texts.append(text if offset else text.removeprefix("\ufeff"))


def read_jsonl(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[Batch]:
    """Yields the documents of a segment; `fields` are dotted paths of metadata.

    If the checksum of a compressed file does not match, it yields what comes before the first line
    that cannot be decoded: later lines may look right and be wrong.

    Raises:
        DamagedFileError: after the last good line of a truncated or corrupt compressed file.
    """
    decoder = _LineDecoder(key, fields)
    damage = functools.cache(lambda: find_damage(segment))
    line_number, offset = 1, segment.start
    for lines, n_bytes, span in _read_lines(segment):
        offset += span
        faults: list[Fault] = []
        ended = None
        try:
            documents = [decoder.decode(line) for line in lines if line]
            metadata = decoder.columns(documents)
        except _DECODE_ERRORS:
            # Counted back from the end, because a line that was too long is not there any more.
            start = offset - sum(map(len, lines)) - len(lines)
            offsets = list(accumulate((len(line) + 1 for line in lines), initial=start))
            decoded = [
                decoder.decode_with_care(line, line_number + n, offsets[n])
                for n, line in enumerate(lines)
            ]
            garbled = [
                n
                for n, result in enumerate(decoded)
                if isinstance(result, Fault) and result.kind in _GARBLED
            ]
            error = damage() if garbled else None
            if error is not None and (suspect_from := error.suspect_from) is not None:
                suspect = next((n for n in garbled if offsets[n] >= suspect_from), None)
                lines, decoded = lines[:suspect], decoded[:suspect]
                ended = error if suspect is not None else None
            faults = [result for result in decoded if isinstance(result, Fault)]
            documents = [result for result in decoded if result and not isinstance(result, Fault)]
            metadata = decoder.columns(documents)
        texts = [document.text for document in documents]
        yield Batch(texts, len(lines), n_bytes, faults, metadata)
        if ended is not None:
            raise ended
        line_number += len(lines)


class _LongLine(bytes):
    """The start of a line longer than MAX_DOCUMENT_BYTES, behind a zero byte that no JSON has."""

    n_bytes: int


def _attribute(name: str) -> str:
    """Names any key of JSON as Python can."""
    return f"field_{name.encode().hex()}"


def _read_lines(segment: Segment) -> Iterator[tuple[list[bytes], int, int]]:
    """Yields complete lines without newlines, the file's bytes they took, and their own bytes."""
    pending: list[bytes] = []
    pending_bytes = taken = 0
    for block, n_bytes in read_blocks(segment):
        taken += n_bytes
        cut = block.rfind(b"\n")
        if cut >= 0:
            lines = block[:cut].split(b"\n")
            lines[0] = _join_line(pending, pending_bytes + len(lines[0]), lines[0])
            yield lines, taken, pending_bytes + cut + 1
            pending, pending_bytes, taken = [], 0, 0
            block = block[cut + 1 :]
        pending_bytes += len(block)
        pending.append(block)
        if pending_bytes > MAX_DOCUMENT_BYTES:
            pending = [start_of(pending)]
    if pending_bytes:
        yield [_join_line(pending, pending_bytes, b"")], taken, pending_bytes + 1


def _join_line(pending: list[bytes], n_bytes: int, end: bytes) -> bytes:
    if n_bytes <= MAX_DOCUMENT_BYTES:
        return b"".join([*pending, end])
    line = _LongLine(b"\0" + start_of([*pending, end]))
    line.n_bytes = n_bytes
    return line


class _LineDecoder:
    """Makes an object with `text` and the asked metadata of a line of JSON."""

    def __init__(self, key: str, fields: Sequence[str]) -> None:
        self._key = key
        self._paths = {field: field.split(".") for field in fields}
        self._names = {path[0]: _attribute(path[0]) for path in self._paths.values()}
        self._names.pop(key, None)
        members: list[Any] = [("text", str), *((name, Any, None) for name in self._names.values())]
        rename = {"text": key, **{name: top for top, name in self._names.items()}}
        self._kind = msgspec.defstruct("Document", members, rename=rename)
        self.decode: Callable[[bytes], Any] = msgspec.json.Decoder(self._kind).decode

    def columns(self, documents: list[Any]) -> dict[str, list[str]]:
        """Returns a column of metadata for each field; what is of another shape is missing."""
        columns: dict[str, list[str]] = {}
        for field, (top, *inside) in self._paths.items():
            name = self._names.get(top, "text")
            values = [getattr(document, name) for document in documents]
            for part in inside:
                values = [v.get(part) if isinstance(v, dict) else None for v in values]
            columns[field] = [render_value(value) for value in values]
        return columns

    def decode_with_care(self, line: bytes, number: int, offset: int) -> Any | Fault | None:
        """Returns the document of one line, what is wrong with it, or None for a blank line."""
        if offset == 0 and line.startswith(codecs.BOM_UTF8):
            line, offset = line.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
        if not line.strip(b" \t\r"):
            return None
        if isinstance(line, _LongLine):
            return too_long("line", number, line[1:], line.n_bytes)
        try:
            document = self.decode(line)
            self.columns([document])
            return document
        except _DECODE_ERRORS:
            pass
        # Python's decoder lets a little more pass (NaN in another field) and says more.
        try:
            return self._read_value(json.loads(line.decode()), number, line)
        except UnicodeDecodeError as error:
            return invalid_utf8(error, number, offset)
        except (ValueError, RecursionError) as error:
            detail = f"the line is not valid JSON: {error}"
            hint = "write one JSON object per line"
            return Fault("malformed JSON", number, detail, hint, line)

    def _read_value(self, value: object, number: int, line: bytes) -> Any | Fault:
        if not isinstance(value, dict):
            detail = f"expected a JSON object, found {json.dumps(value)[:40]}"
            return Fault("malformed JSON", number, detail, f'write {{"{self._key}": "..."}}', line)
        if self._key not in value:
            return missing_key(self._key, list(value), number, line)
        text = value[self._key]
        if not isinstance(text, str):
            detail = f'the value of "{self._key}" is {json.dumps(text)[:40]}, not a string'
            return Fault("not a string", number, detail, "fix the line, or leave it out", line)
        document = self._kind(text, *map(value.get, self._names))
        rendered = {field: column[0] for field, column in self.columns([document]).items()}
        for name, value in {self._key: text, **rendered}.items():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                code = f"\\u{ord(value[error.start]):04x}"
                detail = f'"{name}" holds the lone surrogate {code} at character {error.start}'
                hint = "it is half a character: write it whole"
                return Fault("lone surrogate", number, detail, hint, line)
        return document
