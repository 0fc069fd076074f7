"""Documents of text out of JSON lines, Parquet and plain text, with every fault and its place."""

from __future__ import annotations

import codecs
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trainyard.data.sources.blocks import DamagedFileError, read_blocks
from trainyard.data.sources.files import Segment, format_of
from trainyard.errors import DataError

# Bounds the memory of a worker, which holds a document, its text and its ids at once.
MAX_DOCUMENT_BYTES = 128 * 2**20
_PARQUET_ROWS = 512
_TOO_LONG = b"\0 this line is longer than MAX_DOCUMENT_BYTES"
_LENGTH_HINT = "split it into documents; 128 MiB is the most that one may have"


@dataclass(frozen=True)
class Fault:
    """A document that cannot be read.

    `position` is its line (JSON lines) or row (Parquet) counted from 1 in its segment; 0 means the
    whole file.
    """

    kind: str
    position: int
    detail: str
    hint: str


@dataclass(frozen=True)
class Batch:
    """Consecutive documents; `n_bytes` is the share of the file, `n_lines` of its lines or rows."""

    texts: list[str]
    n_lines: int
    n_bytes: int
    faults: list[Fault] = field(default_factory=list)


def read_documents(segment: Segment, key: str) -> Iterator[Batch]:
    """Yields the documents of a segment in file order; `key` is the JSON key or Parquet column."""
    found = format_of(segment.path)
    assert found is not None, "find_files lets only known formats through"
    read = {"jsonl": _read_jsonl, "parquet": _read_parquet, "txt": _read_txt}[found[0]]
    n_lines = 0
    try:
        for batch in read(segment, key):
            n_lines += batch.n_lines
            yield batch
    except OSError as error:
        problem = f"{segment.path} cannot be read: {error.strerror}"
        raise DataError(problem, "check that the file is there and may be read") from error
    except DamagedFileError as error:
        detail = f"the file is damaged after line {n_lines}: {error}"
        hint = "fetch or make the file again; on_error=skip keeps what comes before the damage"
        yield Batch([], 0, 0, [Fault("damaged file", 0, detail, hint)])


def _read_jsonl(segment: Segment, key: str) -> Iterator[Batch]:
    # A typed decoder passes over every other field without making Python objects of it.
    document = msgspec.defstruct("Document", [("text", str)], rename={"text": key})
    decode: Any = msgspec.json.Decoder(document).decode
    line_number, offset = 1, segment.start
    for lines, n_bytes, span in _read_lines(segment):
        offset += span
        faults: list[Fault] = []
        try:
            texts = [decode(line).text for line in lines if line]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            # Counted back from the end, because a line that was too long is not there any more.
            start = offset - sum(map(len, lines)) - len(lines)
            texts, faults = _decode_one_by_one(lines, key, decode, (line_number, start))
        yield Batch(texts, len(lines), n_bytes, faults)
        line_number += len(lines)


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
            pending = []
    if pending_bytes:
        yield [_join_line(pending, pending_bytes, b"")], taken, pending_bytes + 1


def _join_line(pending: list[bytes], n_bytes: int, end: bytes) -> bytes:
    return _TOO_LONG if n_bytes > MAX_DOCUMENT_BYTES else b"".join([*pending, end])


def _decode_one_by_one(
    lines: list[bytes], key: str, decode: Any, start: tuple[int, int]
) -> tuple[list[str], list[Fault]]:
    """Decodes lines that hold a fault; `start` is the number and the byte of the first one."""
    texts: list[str] = []
    faults: list[Fault] = []
    number, place = start
    for line in lines:
        if place == 0 and line.startswith(codecs.BOM_UTF8):
            line, place = line.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
        text = _decode_with_care(line, key, decode, number, place)
        if isinstance(text, Fault):
            faults.append(text)
        elif text is not None:
            texts.append(text)
        number, place = number + 1, place + len(line) + 1
    return texts, faults


def _decode_with_care(
    line: bytes, key: str, decode: Any, number: int, offset: int
) -> str | Fault | None:
    """Gives the text of one line, what is wrong with it, or None for a blank line."""
    if not line.strip(b" \t\r"):
        return None
    if line == _TOO_LONG:
        return Fault("too long", number, "the line is too long", _LENGTH_HINT)
    try:
        return str(decode(line).text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    # The typed decoder is stricter than Python's (NaN in another field) and says less.
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _invalid_utf8(error, number, offset)
    except (json.JSONDecodeError, RecursionError) as error:
        hint = "write one JSON object a line; on_error=skip leaves bad lines out and counts them"
        return Fault("malformed JSON", number, f"the line is not valid JSON: {error}", hint)
    return _text_of(value, key, number)


def _text_of(value: object, key: str, number: int) -> str | Fault:
    if not isinstance(value, dict):
        detail = f"expected a JSON object, found {json.dumps(value)[:40]}"
        return Fault("malformed JSON", number, detail, f'write {{"{key}": "..."}}')
    if key not in value:
        return _missing_key(key, [str(name) for name in value], number)
    text = value[key]
    if not isinstance(text, str):
        detail = f'the value of "{key}" is {json.dumps(text)[:40]}, not a string'
        return Fault("not a string", number, detail, "mend the line, or leave it out")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        detail = f'"{key}" holds the lone surrogate {code} at character {error.start}'
        return Fault("lone surrogate", number, detail, "it is half a character: write it whole")
    return text


def _missing_key(key: str, present: list[str], number: int) -> Fault:
    near = difflib.get_close_matches(key, present, n=1)
    listing = ", ".join(present[:10]) or "none"
    detail = f'there is no key "{key}"; the keys are: {listing}'
    hint = f'did you mean "{near[0]}"? name it as json_key' if near else "name another json_key"
    return Fault("missing key", number, detail, hint)


def _invalid_utf8(error: UnicodeDecodeError, number: int, offset: int) -> Fault:
    detail = f"byte {offset + error.start} (0x{error.object[error.start]:02x}) is not valid UTF-8"
    return Fault("invalid UTF-8", number, detail, "convert the file to UTF-8")


def _read_txt(segment: Segment, key: str) -> Iterator[Batch]:
    pieces: list[bytes] = []
    total_bytes = 0
    for block, _ in read_blocks(segment):
        total_bytes += len(block)
        pieces.append(block)
        if total_bytes > MAX_DOCUMENT_BYTES:
            fault = Fault("too long", 0, "the file is too long for one document", _LENGTH_HINT)
            yield Batch([], 1, segment.end, [fault])
            return
    data = b"".join(pieces)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        yield Batch([], 1, segment.end, [_invalid_utf8(error, 0, 0)])
        return
    yield Batch([text.removeprefix("\ufeff")], 1, segment.end)


def _read_parquet(segment: Segment, key: str) -> Iterator[Batch]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(segment.path) as file:
            names = file.schema_arrow.names
            if key not in names:
                yield Batch([], 0, segment.end, [_missing_key(key, names, 0)])
                return
            n_rows = max(file.metadata.num_rows, 1)
            row = 1
            batches = file.iter_batches(_PARQUET_ROWS, columns=[key], use_threads=False)
            for rows in batches:
                texts, faults = _texts_of_column(rows.column(0), key, row)
                share = segment.end * len(rows) // n_rows
                yield Batch(texts, len(rows), share, faults)
                row += len(rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise DamagedFileError(str(error)) from error


def _texts_of_column(column: Any, key: str, row: int) -> tuple[list[str], list[Fault]]:
    texts: list[str] = []
    faults: list[Fault] = []
    for number, scalar in enumerate(column, row):
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            detail = f"byte {error.start} of the text is not valid UTF-8"
            faults.append(Fault("invalid UTF-8", number, detail, "write the file from UTF-8 text"))
            continue
        if isinstance(value, str):
            texts.append(value)
        else:
            detail = f'the value of "{key}" is {str(value)[:40]}, not a string'
            hint = "choose a column of strings as json_key, or leave the row out"
            faults.append(Fault("not a string", number, detail, hint))
    return texts, faults
