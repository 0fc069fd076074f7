"""What readers yield: consecutive documents, with faults and drops."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trainyard.corpus.sources.files import format_of
from trainyard.errors import DataError, printable

# Bounds the memory of a worker, which holds a document, its text and its ids at once.
MAX_DOCUMENT_BYTES = 32 * 2**20
_KEPT_BYTES = 2**16


class Fault(msgspec.Struct, frozen=True):
    """A document that cannot be read.

    `position` is its line (JSON lines), row (Parquet, Arrow) or page (Wikipedia) counted from 1 in
    its segment; 0 means the whole file. `raw` is its text, cut if it is too long.
    `n_documents` are lost.
    """

    kind: str
    position: int
    detail: str
    hint: str
    raw: bytes = b""
    n_documents: int = 1
    path: str = ""

    def render(self, lines_before: int) -> str:
        """Renders it for people: `corpus.jsonl:12: the line is not valid JSON: ...`."""
        kind, _ = format_of(Path(self.path))
        number = self.position + lines_before
        unit = {"parquet": ", row ", "arrow": ", row ", "wikipedia": ", page "}
        separator = unit.get(kind, ":")
        location = f"{separator}{number}" if self.position else ""
        return f"{printable(self.path)}{location}: {self.detail}"

    def to_error(self, lines_before: int = 0) -> DataError:
        """Builds the error of a run that stops here."""
        hint = "or pass --on-error quarantine: it sets bad documents aside and counts them"
        return DataError(self.render(lines_before), f"{self.hint}\n{hint}")


class UnreadableDocumentError(Exception):
    """A document, or a whole file, that cannot be read."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


@dataclass
class Batch:
    """Consecutive documents of a segment.

    `n_bytes` is the share of the file they took, `n_lines` of its lines, rows or pages. `fields`
    holds a column of metadata for every field that was asked for, one value for each text ("" where
    there is none). `dropped` counts the documents that the format itself leaves out, by reason;
    `dropped_sentences` counts sentences of Wikipedia, by the template that could not be rendered.
    """

    texts: list[str]
    n_lines: int
    n_bytes: int
    faults: list[Fault] = field(default_factory=list)
    fields: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_sentences: dict[str, int] = field(default_factory=dict)


def start_of(pieces: list[bytes]) -> bytes:
    """Returns the kept part of a document too long for memory."""
    return b"".join(piece[:_KEPT_BYTES] for piece in pieces)[:_KEPT_BYTES]


def render_value(value: object) -> str:
    """Renders metadata as text: "" for none, JSON for what is of a type of JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | list | dict):
        return json.dumps(value, default=str)
    return "" if value is None else str(value)


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
