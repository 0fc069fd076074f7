"""Reads documents from JSON Lines: one object per line, with text and metadata under keys.

Ordinary lines go through a typed decoder that only creates requested Python objects. It is strict
with terse errors, so a batch with a fault is decoded again line by line.
"""

from __future__ import annotations

import codecs
import difflib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from trainyard.corpus.sources.batch import Batch, Fault
from trainyard.corpus.sources.blocks import find_damage, read_blocks
from trainyard.corpus.sources.files import Segment

# Bounds the memory of a worker, which holds a document, its text and its ids at once.
MAX_DOCUMENT_BYTES = 32 * 2**20
_KEPT_BYTES = 2**16
_GARBLED = ("malformed JSON", "invalid UTF-8")
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


def read_jsonl(segment: Segment, key: str, fields: Sequence[str]) -> Iterator[Batch]:
    """Yields the documents of a segment; `fields` are dotted paths of metadata.

    Of a compressed file whose checksum does not fit, it yields what comes before the first line
    that makes no sense: lines behind it may make sense and be wrong.

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
            places = list(accumulate((len(line) + 1 for line in lines), initial=start))
            decoded = [
                decoder.decode_with_care(line, line_number + n, places[n])
                for n, line in enumerate(lines)
            ]
            garbled = [
                n
                for n, result in enumerate(decoded)
                if isinstance(result, Fault) and result.kind in _GARBLED
            ]
            error = damage() if garbled else None
            if error is not None and (suspect_from := error.suspect_from) is not None:
                suspect = next((n for n in garbled if places[n] >= suspect_from), None)
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


def render_value(value: object) -> str:
    """Renders metadata as text: "" for none, JSON for what is of a type of JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | list | dict):
        return json.dumps(value, default=str)
    return "" if value is None else str(value)


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


def start_of(pieces: list[bytes]) -> bytes:
    """Returns the kept part of a document too long for memory."""
    return b"".join(piece[:_KEPT_BYTES] for piece in pieces)[:_KEPT_BYTES]


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


def too_long(what: str, position: int, start: bytes, n_bytes: int) -> Fault:
    """Builds the fault of a document too long for memory, with the start of it."""
    detail = f"the {what} has {n_bytes:,} bytes; a document may have {MAX_DOCUMENT_BYTES:,}"
    return Fault("too long", position, detail, "split it into several documents", start)


def missing_key(key: str, present: list[str], number: int, raw: bytes = b"") -> Fault:
    """Builds the fault of a document, or a table, without the key."""
    # A key may be a megabyte, or hold half a character, which no message can.
    shown = [name[:40].encode(errors="backslashreplace").decode() for name in present[:100]]
    near = difflib.get_close_matches(key, shown, n=1)
    listing = ", ".join(shown[:10]) or "none"
    detail = f'there is no key "{key}"; the keys are: {listing}'
    option = "--json-key, or json_key of a data file"
    hint = f'did you mean "{near[0]}"? name it with {option}' if near else f"name it with {option}"
    if key.partition(".")[0] in shown:
        hint = "json_key names a key of the outermost object: keys inside others are not supported"
    return Fault("missing key", number, detail, hint, raw)


def invalid_utf8(error: UnicodeDecodeError, position: int, offset: int) -> Fault:
    """Builds the fault of bytes that are no UTF-8; `offset` is where the decoded bytes began."""
    detail = f"byte {offset + error.start} (0x{error.object[error.start]:02x}) is not valid UTF-8"
    return Fault("invalid UTF-8", position, detail, "convert the file to UTF-8", error.object)
