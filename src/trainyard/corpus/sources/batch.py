"""Readers' output: consecutive documents, with faults and drops."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trainyard.corpus.sources.files import format_of
from trainyard.errors import DataError, printable


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
        place = f"{separator}{number}" if self.position else ""
        return f"{printable(self.path)}{place}: {self.detail}"

    def to_error(self, lines_before: int = 0) -> DataError:
        """Builds the error of a run that stops here."""
        hint = "or pass --on-error quarantine: it sets bad documents aside and counts them"
        return DataError(self.render(lines_before), f"{self.hint}\n{hint}")


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
